#!/usr/bin/env python3
"""Evaluate a demonstration checkpoint: acceptance of the native and the windowed draft.

Prompts are new to the checkpoint: training draws its documents from ``random.Random(seed)``, and
these are made from string seeds of 10,000 and more. Every prompt is answered in all three arms
through the public API, greedily, and the outputs are compared.

    python build_scripts/evaluate_demo_checkpoint.py MODEL [--prompts 20] [--kinds logs,sentences]

writes ``evaluation.json`` beside the weights and prints a Markdown table. Every answer is kept in a
JSONL file as soon as it is there, so an interrupted run goes on where it stopped. At 64K tokens the
native arm's prefill takes most of the time (half a minute and more per prompt on two cores).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tllm_wmtp import LLM, KvCacheConfig, MtpConfig, SamplingParams
from tllm_wmtp.cli.arguments import model_directory
from tllm_wmtp.demo import language
from tllm_wmtp.metrics import acceptance_length, conditional_acceptance

ARMS = ("dense", "windowed", "native")
#: Contexts, in tokens, at which each kind of prompt is asked by default.
CONTEXTS = {"logs": (65536,), "sentences": (65536,), "lists": (4096, 16384)}
FIRST_SEED = 10_000
#: Required of the windowed draft at 64K tokens: acceptance length, and share of native's.
REQUIRED_AL = {"logs": 4.0, "sentences": 2.0}
REQUIRED_SHARE = 0.85
RESAMPLES = 2000


Record = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "checkpoint", type=model_directory, help="a directory, or demo or demo-mamba2"
    )
    parser.add_argument("--prompts", type=int, default=20, help="prompts per kind and context")
    parser.add_argument("--kinds", default="logs,sentences,lists", help="separated by commas")
    parser.add_argument("--contexts", help="tokens, by commas, in place of each kind's own")
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    parser.add_argument("--max-tokens", type=int, default=96, help="of logs and sentences")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--window", type=int, default=4032)
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--out", type=Path, help="evaluation.json (default: in the checkpoint)")
    parser.add_argument("--answers", type=Path, help="JSONL of answers (default: in runs/)")
    args = parser.parse_args()
    unknown = set(args.kinds.split(",")) - set(CONTEXTS)
    if unknown:
        parser.error(f"kinds {sorted(unknown)}: known are {', '.join(CONTEXTS)}; correct --kinds")
    if args.prompts < 2:
        parser.error(f"prompts {args.prompts}: an interval needs 2 or more; raise --prompts")
    return args


def tasks(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """``(kind, context, seed)``, cheap ones first, seed by seed so that a stop leaves a balance."""
    chosen = []
    for kind in args.kinds.split(","):
        contexts = args.contexts.split(",") if args.contexts else CONTEXTS[kind]
        chosen += [(kind, int(context)) for context in contexts]
    chosen.sort(key=lambda pair: pair[1])
    seeds = range(FIRST_SEED, FIRST_SEED + args.prompts)
    return [
        (kind, context, seed)
        for length in sorted({context for _, context in chosen})
        for seed in seeds
        for kind, context in chosen
        if context == length
    ]


def fingerprint(args: argparse.Namespace) -> str:
    """Weights and operating point: answers of another one are not taken up."""
    digest = hashlib.sha256((args.checkpoint / "model.safetensors").read_bytes())
    digest.update(f"{args.depth} {args.window} {args.sink} {args.max_tokens}".encode())
    return digest.hexdigest()[:16]


def answer_all(args: argparse.Namespace, path: Path) -> list[Record]:
    """Every task in every arm; answers found in ``path`` are not made again."""
    mark, arms = fingerprint(args), args.arms.split(",")
    wanted = tasks(args)
    found: dict[tuple[str, int, int, str], Record] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["fingerprint"] == mark:
                found[key_of(record)] = record
    longest = max(context for _, context, _ in wanted) + args.max_tokens + 64
    speculation = {
        "dense": None,
        "native": MtpConfig.native(args.depth),
        "windowed": MtpConfig(args.depth, args.window, args.sink),
    }
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack, path.open("a", encoding="utf-8") as sink:
        llms = {
            arm: stack.enter_context(
                LLM(
                    args.checkpoint,
                    speculation=speculation[arm],
                    kv_cache_config=KvCacheConfig(max_tokens=longest + 256),
                    max_batch_size=1,
                    max_seq_len=longest,
                )
            )
            for arm in arms
        }
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        bar = progress.add_task("", total=len(wanted) * len(arms))
        for kind, context, seed in wanted:
            for arm in arms:
                progress.update(bar, description=f"{kind} {context:,} {arm}")
                key = (kind, context, seed, arm)
                if key not in found:
                    found[key] = {
                        "fingerprint": mark,
                        **answer(llms[arm], kind, context, seed, args.max_tokens),
                    }
                    sink.write(json.dumps(found[key]) + "\n")
                    sink.flush()
                progress.advance(bar)
    return [found[kind, context, seed, arm] for kind, context, seed in wanted for arm in arms]


def key_of(record: Record) -> tuple[str, int, int, str]:
    return record["kind"], record["context"], record["seed"], record["arm"]


def answer(llm: LLM, kind: str, context: int, seed: int, max_tokens: int) -> Record:
    prompt = language.prompt(kind, context, seed)
    if prompt.expected_ids is not None:
        max_tokens = len(prompt.expected_ids)
    output = llm.generate(prompt.ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    metrics = output.metrics
    if metrics is None:
        raise RuntimeError("an answer without metrics")
    record: Record = {
        "kind": kind,
        "context": context,
        "seed": seed,
        "arm": llm.arm,
        "prompt_tokens": len(prompt.ids),
        "token_ids": output.outputs[0].token_ids,
        "histogram": metrics.accepted_histogram,
        "ttft_s": metrics.ttft_s,
    }
    if prompt.expected_ids is not None:
        expected = values_of(language.text_of(prompt.expected_ids))
        given = values_of(output.outputs[0].text)
        record["values"] = len(expected)
        record["values_right"] = sum(given.get(key) == value for key, value in expected.items())
        records = records_of(prompt.text)
        record["entries"] = len(given)
        record["entries_true"] = sum(records.get(key) == value for key, value in given.items())
    return record


def records_of(text: str) -> dict[str, str]:
    """Keys and values of a prompt's record lines, ``key amber = lion pear .``"""
    return dict(re.findall(r"^key (.+) = (\w+ \w+) \.$", text, re.MULTILINE))


def values_of(text: str) -> dict[str, str]:
    """Keys and values of an enumeration ``amber = lion pear ; jade = crab fig ; .``"""
    pairs = {}
    for item in text.split("\n")[0].split(";"):
        key, equals, value = item.partition("=")
        if equals:
            pairs[" ".join(key.split())] = " ".join(value.split())
    return pairs


def pooled(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Steps of all prompts together, by accepted drafts."""
    return [sum(counts) for counts in zip(*histograms, strict=True)]


def bootstrap(size: int, statistic: Callable[[list[int]], float]) -> list[float]:
    """95 % percentile interval of ``statistic`` over resampled prompts (their indices)."""
    rng = random.Random(0)
    values = sorted(
        statistic([int(rng.random() * size) for _ in range(size)]) for _ in range(RESAMPLES)
    )
    return [values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES) - 1]]


def al_of(histograms: Sequence[Sequence[int]], chosen: Sequence[int]) -> float:
    return acceptance_length(pooled([histograms[index] for index in chosen]))


def arm_report(records: Sequence[Record]) -> dict[str, Any]:
    histograms = [record["histogram"] for record in records]
    total = pooled(histograms)
    return {
        "al": acceptance_length(total),
        "al_interval": bootstrap(len(records), lambda chosen: al_of(histograms, chosen)),
        "histogram": total,
        "alpha": [
            {
                "value": alpha.value if alpha.trials else None,
                "interval": list(alpha.interval),
                "trials": alpha.trials,
            }
            for alpha in conditional_acceptance(total)
        ],
        "ttft_s_mean": sum(record["ttft_s"] for record in records) / len(records),
    }


def set_report(kind: str, context: int, records: Sequence[Record]) -> dict[str, Any]:
    """All prompts of one kind and context."""
    arms = sorted({record["arm"] for record in records}, key=ARMS.index)
    by_arm = {arm: [r for r in records if r["arm"] == arm] for arm in arms}
    outputs = zip(*([r["token_ids"] for r in by_arm[arm]] for arm in arms), strict=True)
    prompts = len(by_arm[arms[0]])
    report: dict[str, Any] = {
        "kind": kind,
        "context": context,
        "prompts": prompts,
        "identical_outputs": sum(all(o == same[0] for o in same) for same in outputs),
        "arms": {arm: arm_report(by_arm[arm]) for arm in arms if arm != "dense"},
    }
    if {"native", "windowed"} <= set(arms):
        native = [record["histogram"] for record in by_arm["native"]]
        windowed = [record["histogram"] for record in by_arm["windowed"]]

        def share(chosen: Sequence[int]) -> float:
            return al_of(windowed, chosen) / al_of(native, chosen)

        report["windowed_over_native"] = share(range(prompts))
        report["windowed_over_native_interval"] = bootstrap(prompts, share)
    first = by_arm[arms[0]]
    if "values" in first[0]:
        asked = sum(record["values"] for record in first)
        report["values_asked"] = asked
        report["values_right_share"] = sum(r["values_right"] for r in first) / asked
        report["entries"] = sum(r["entries"] for r in first)
        report["entries_true_share"] = sum(r["entries_true"] for r in first) / max(
            report["entries"], 1
        )
    if kind in REQUIRED_AL and context == 65536 and "windowed_over_native" in report:
        report["required_al"] = REQUIRED_AL[kind]
        report["meets_requirement"] = (
            report["arms"]["windowed"]["al"] >= REQUIRED_AL[kind]
            and report["windowed_over_native"] >= REQUIRED_SHARE
        )
    return report


def markdown(reports: Sequence[dict[str, Any]]) -> str:
    """One row per kind and context; 95 % intervals in brackets."""
    lines = [
        "| prompts | context | n | AL native | AL windowed | windowed / native | identical "
        "| asked values right | entries that are true records |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for report in reports:
        cells = []
        for arm in ("native", "windowed"):
            if numbers := report["arms"].get(arm):
                low, high = numbers["al_interval"]
                cells.append(f"{numbers['al']:.2f} [{low:.2f}, {high:.2f}]")
            else:
                cells.append("not run")
        if "windowed_over_native" in report:
            low, high = report["windowed_over_native_interval"]
            cells.append(f"{report['windowed_over_native']:.2f} [{low:.2f}, {high:.2f}]")
        else:
            cells.append("not run")
        cells.append(f"{report['identical_outputs']} / {report['prompts']}")
        right = report.get("values_right_share")
        cells.append("" if right is None else f"{right:.0%} of {report['values_asked']}")
        true = report.get("entries_true_share")
        cells.append("" if true is None else f"{true:.0%} of {report['entries']}")
        lines.append(
            f"| {report['kind']} | {report['context']:,} | {report['prompts']} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


def main() -> int:
    args = parse_arguments()
    out = args.out or args.checkpoint / "evaluation.json"
    answers = args.answers or Path("runs") / f"evaluation-{fingerprint(args)}.jsonl"
    answers.parent.mkdir(parents=True, exist_ok=True)
    records = answer_all(args, answers)
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["kind"], record["context"]), []).append(record)
    reports = [set_report(kind, context, group) for (kind, context), group in groups.items()]
    result = {
        "checkpoint": fingerprint(args),
        "depth": args.depth,
        "window": args.window,
        "n_sink": args.sink,
        "max_tokens": args.max_tokens,
        "dtype": "float32",
        "first_seed": FIRST_SEED,
        "intervals": "acceptance length and ratio: bootstrap over prompts, 95 %; alpha: Wilson",
        "sets": reports,
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(reports))
    different = sum(r["prompts"] - r["identical_outputs"] for r in reports)
    if different:
        print(f"{different} prompts were answered differently by different arms", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
