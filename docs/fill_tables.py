#!/usr/bin/env python3
"""Puts measured results into the tables of the README and of docs/benchmarks.

    wmtp demo --json > demo.json
    wmtp bench step --json > step.json
    python docs/fill_tables.py demo.json step.json

Knows the JSON of ``wmtp demo``, of ``wmtp bench`` step, depth, prefill and attention, and of
``build_scripts/evaluate_demo_checkpoint.py`` by its content. A table stands between the comments
``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks" / "README.md")


def table(head: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1) -> str:
    """A Markdown table whose first ``words`` columns are text, the others numbers."""
    rule = ["---" if index < words else "---:" for index in range(len(head))]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, rule, *rows))


def machine(facts: dict[str, Any]) -> str:
    return (
        f"Measured on {facts['date']}: {facts['processor']}, {facts['threads']} threads, "
        f"{facts['isa']}."
    )


def demo(report: dict[str, Any]) -> tuple[str, str]:
    rows = [
        [
            arm,
            numbers["tokens"],
            f"{numbers['al']:.2f}",
            f"{numbers['tpot_ms']:.2f}",
            f"{numbers['step_ms']:.2f}",
            f"{numbers['draft_ms']:.2f}",
            f"{numbers['verify_ms']:.2f}",
            f"{numbers['ttft_ms'] / 1e3:.1f}",
            f"{numbers['draft_kv_bytes'] / 2**20:.1f}",
        ]
        for arm, numbers in report["arms"].items()
    ]
    head = (
        "arm", "tokens", "AL", "TPOT ms", "step ms", "draft ms", "verify ms", "TTFT s",
        "draft KV MiB",
    )  # fmt: skip
    same = "identical" if report["lossless"] else "NOT identical"
    lines = [
        f"{report['context']:,} tokens of context, depth {report['depth']}, window "
        f"{report['window']}, sink {report['n_sink']}, {report['dtype']}, "
        f"{len(report['prompts'])} prompt(s). The arms' outputs are {same}. {machine(report)}",
        "",
        table(head, rows),
    ]
    if estimate := report.get("native_estimate"):
        lines += [
            "",
            f"Estimate for the native arm, which was not run: {estimate['prefill_s'] / 60:.0f} "
            f"minutes of prefill, {estimate['draft_kv_bytes'] / 2**20:,.0f} MiB of draft KV, "
            f"{estimate['step_ms']:.0f} ms per step.",
        ]
    return "demo-1m" if report["context"] > 1_000_000 else "demo", "\n".join(lines)


def step(result: dict[str, Any]) -> tuple[str, str]:
    first = result["rows"][0]
    rows = []
    for row in result["rows"]:
        low, high = row["step_ms_interquartile"]
        rows.append(
            [
                row["arm"],
                f"{row['context']:,}",
                f"{row['step_ms']:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{row['draft_ms']:.2f}",
                f"{row['verify_ms']:.2f}",
                f"{row['bytes_moved'] / 1e6:,.0f}",
                f"{row['fraction_of_floor']:.0%}",
            ]
        )
    head = (
        "arm", "context", "step ms", "interquartile", "draft ms", "verify ms", "MB read",
        "floor / time",
    )  # fmt: skip
    ratios = []
    for entry in result["ratios"]:
        low, high = entry["step_native_over_windowed_interquartile"]
        ratios.append(
            [
                f"{entry['context']:,}",
                f"{entry['step_native_over_windowed']:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{entry['draft_native_over_windowed']:.2f}",
            ]
        )
    lines = [
        f"Model {first['model']}, depth {first['depth']}, window {first['window']}, sink "
        f"{first['n_sink']}, KV {first['kv_dtype']}, batch 1, {first['n_runs']} runs per row. "
        f"{machine(first)}",
        "",
        table(head, rows),
        "",
        table(("context", "native / windowed step", "interquartile", "draft phase"), ratios),
    ]
    return f"bench-step-{first['kv_dtype']}", "\n".join(lines)


def depth(result: dict[str, Any]) -> tuple[str, str]:
    ratios = {(entry["workload"], entry["arm"]): entry for entry in result["ratios"]}
    rows = []
    for row in result["rows"]:
        over = "1"
        if entry := ratios.get((row["workload"], row["arm"])):
            low, high = entry["interval"]
            over = f"{entry['over_adaptive']:.2f} [{low:.2f}, {high:.2f}]"
        rows.append(
            [
                row["workload"],
                row["arm"],
                f"{row['al']:.2f}",
                f"{row['mean_depth']:.1f}",
                f"{row['tpot_ms']:.2f}",
                f"{row['ms_per_token']:.2f}",
                over,
            ]
        )
    head = (
        "text", "arm", "AL", "mean depth", "TPOT ms", "all ms / token", "time over adaptive",
    )  # fmt: skip
    texts = "; ".join(f"{name}: {kind}" for name, kind in result["workloads"].items())
    same = "identical" if result["lossless"] else "NOT identical"
    lines = [
        f"{result['context']:,} tokens of context, {result['prompts']} prompts of each text, "
        f"{result['max_tokens']} tokens each, window {result['window']}, sink {result['n_sink']}, "
        f"{result['dtype']} ({texts}). The arms' outputs are {same}; 95 % intervals, bootstrap "
        f"over blocks of tokens. {machine(result)}",
        "",
        table(head, rows, words=2),
    ]
    return "bench-depth", "\n".join(lines)


def prefill(result: dict[str, Any]) -> tuple[str, str]:
    ratios = {(entry["context"], entry["arm"]): entry for entry in result["ratios"]}
    rows = []
    for row in result["rows"]:
        low, high = row["ttft_s_interquartile"]
        ratio = ""
        if row["pruned"]:
            ratio = f"{ratios[row['context'], row['arm']]['unpruned_over_pruned']:.2f}"
        rows.append(
            [
                row["arm"],
                "yes" if row["pruned"] else "no",
                f"{row['prompt_tokens']:,}",
                f"{row['ttft_s']:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{row['prefill_s']:.2f}",
                f"{row['last_layer_rows']:,}",
                f"{row['draft_rows']:,}",
                ratio,
            ]
        )
    head = (
        "arm", "pruned", "prompt tokens", "TTFT s", "interquartile", "prefill s",
        "rows of the last layer", "rows the draft stores", "unpruned / pruned",
    )  # fmt: skip
    first = result["rows"][0]
    lines = [
        f"Window {first['window']}, sink {first['n_sink']}, depth {first['depth']}, "
        f"{first['dtype']}, {first['n_runs']} runs per row. {machine(result)}",
        "",
        table(head, rows, words=2),
    ]
    return "bench-prefill", "\n".join(lines)


def attention(result: dict[str, Any]) -> tuple[str, str]:
    rows = [
        [
            row["kv_dtype"],
            row["head_dim"],
            f"{row['context']:,}",
            row["n_rows"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['sdpa_gqa_seconds'] * 1e3:.2f}",
            f"{row['sdpa_fold_seconds'] * 1e3:.2f}",
            f"{row['speedup_over_best_sdpa']:.2f}",
            f"{row['gb_per_second']:.1f}",
            f"{row['fraction_of_read_bandwidth']:.0%}",
        ]
        for row in result["rows"]
    ]
    head = (
        "KV", "head dim", "keys", "rows", "ours ms", "SDPA gqa ms", "SDPA folded ms",
        "speed-up over the best", "GB/s", "of read bandwidth",
    )  # fmt: skip
    first = result["rows"][0]
    lines = [
        f"{first['n_query_heads']} query heads, {first['n_kv_heads']} KV heads, "
        f"{first['n_runs']} runs per row. {machine(result)}",
        "",
        table(head, rows),
    ]
    return "bench-attention", "\n".join(lines)


def evaluation(result: dict[str, Any]) -> tuple[str, str]:
    rows = []
    for entry in result["sets"]:
        lengths = []
        for arm in ("native", "windowed"):
            low, high = entry["arms"][arm]["al_interval"]
            lengths.append(f"{entry['arms'][arm]['al']:.2f} [{low:.2f}, {high:.2f}]")
        low, high = entry["windowed_over_native_interval"]
        right = entry.get("values_right_share")
        rows.append(
            [
                entry["kind"],
                f"{entry['context']:,}",
                entry["prompts"],
                *lengths,
                f"{entry['windowed_over_native']:.2f} [{low:.2f}, {high:.2f}]",
                f"{entry['identical_outputs']} of {entry['prompts']}",
                "" if right is None else f"{right:.0%}",
                "" if right is None else f"{entry['entries_true_share']:.0%} of {entry['entries']}",
            ]
        )
    head = (
        "prompts", "context", "n", "AL native", "AL windowed", "windowed / native",
        "same output", "asked values right", "entries that are true records",
    )  # fmt: skip
    lines = [
        f"Unseen prompts, depth {result['depth']}, window {result['window']}, sink "
        f"{result['n_sink']}, {result['dtype']}; 95 % intervals, bootstrap over prompts.",
        "",
        table(head, rows),
    ]
    return "evaluation", "\n".join(lines)


def render(result: dict[str, Any]) -> tuple[str, str]:
    """Name of the block and its Markdown."""
    if "sets" in result:
        return evaluation(result)
    if "arms" in result:
        return demo(result)
    benchmarks = {"step": step, "depth": depth, "prefill": prefill, "attention": attention}
    if result.get("benchmark") in benchmarks:
        return benchmarks[result["benchmark"]](result)
    raise ValueError("neither a demo, nor a benchmark, nor an evaluation: check the file")


def fill(page: str, name: str, content: str) -> str:
    """``page`` with the block ``name`` replaced wherever it occurs."""
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    block = re.compile(rf"({re.escape(begin)}\n).*?({re.escape(end)})", re.S)
    return block.sub(lambda match: f"{match[1]}{content}\n{match[2]}", page)


def main(files: Sequence[str]) -> int:
    if not files:
        print(__doc__)
        return 2
    for file in files:
        name, content = render(json.loads(Path(file).read_text(encoding="utf-8")))
        hits = 0
        for path in PAGES:
            page = path.read_text(encoding="utf-8")
            filled = fill(page, name, content)
            hits += f"<!-- {name}:begin -->" in page
            if filled != page:
                path.write_text(filled, encoding="utf-8")
        print(f"{file}: {name}, {hits} page(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
