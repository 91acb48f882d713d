"""``wmtp probe``: what a draft head reads of its keys, and what a window changes."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.cli.bench import output
from tllm_wmtp.errors import ConfigError

#: Models that speak the demonstration's language.
SHIPPED = ("demo", "demo-mamba2")


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    probe = commands.add_parser(
        "probe", help="native against windowed reads of the draft head, at the same hidden states"
    )
    probe.add_argument("--model", default="demo", help="checkpoint directory (default demo)")
    probe.add_argument("--context", type=arguments.context, default="16k", help="default 16k")
    probe.add_argument(
        "--windows",
        type=arguments.key_counts,
        default="256,512,1024,2048,4032",
        help="of the curve (default 256,512,1024,2048,4032)",
    )
    probe.add_argument(
        "--window",
        type=arguments.count,
        help="the operating point, for all but the curve (default: the largest of --windows)",
    )
    probe.add_argument(
        "--sink", type=arguments.count, default=64, help="first tokens always seen (default 64)"
    )
    probe.add_argument(
        "--depth", type=arguments.count, default=7, help="a step has depth - 1 drafts (default 7)"
    )
    probe.add_argument(
        "--inputs",
        type=names,
        help="kinds of prompts, separated by commas (default logs,sentences without --file)",
    )
    probe.add_argument("--file", type=Path, help="a text whose beginning is one more prompt")
    probe.add_argument(
        "--lexicon", help="of generated inputs (default: demo for the shipped models, else english)"
    )
    probe.add_argument("--difficulty", default="medium", help="of generated inputs (medium)")
    probe.add_argument("--path", type=Path, help="file or folder of a published input")
    probe.add_argument(
        "--prompts", type=arguments.positive, default=2, help="per input (default 2)"
    )
    probe.add_argument(
        "--positions", type=arguments.positive, default=64, help="output tokens each (default 64)"
    )
    probe.add_argument("--seed", type=int, default=0, help="of prompts and shuffles (default 0)")
    output.add_output(probe)
    probe.set_defaults(run=run)


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def run(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench.probe.prompts import ProbeInputs
    from tllm_wmtp.bench.probe.run import ProbeBench, run_probe

    tasks = args.inputs
    if tasks is None:
        tasks = () if args.file is not None else ("logs", "sentences")
    bench = ProbeBench(
        model=arguments.model_directory(args.model),
        inputs=ProbeInputs(
            tasks=tasks,
            tokens=args.context,
            count=args.prompts,
            seed=args.seed,
            lexicon=args.lexicon or ("demo" if args.model in SHIPPED else "english"),
            difficulty=args.difficulty,
            path=None if args.path is None else str(args.path),
            text=None if args.file is None else read_text(args.file),
        ),
        windows=tuple(args.windows),
        window=max(args.windows) if args.window is None else args.window,
        n_sink=args.sink,
        depth=args.depth,
        positions=args.positions,
    )
    result = output.with_progress(partial(run_probe, bench), "{task.description}")
    output.write(args.out, result)
    if args.json:
        print(json.dumps(result, allow_nan=False))
    else:
        show(result, Console())
    return 0


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--file {str(file)!r}: {error}", "it must be a text in UTF-8", "check the path"
        ) from error


def show(result: dict[str, Any], console: Console) -> None:
    console.print(prompt_table(result))
    console.print(curve_table(result))
    console.print(perturbation_table(result))
    for line in summary_lines(result):
        console.print(line, highlight=False)


def new_table(title: str, first: str, *others: str) -> Table:
    table = output.table(title)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def prompt_table(result: dict[str, Any]) -> Table:
    table = new_table(
        f"{result['context']:,} tokens, window {result['window']}, sink {result['n_sink']}, depth "
        f"{result['depth']}: same top-1, margins, attention mass",
        "input",
        "same",
        "at flips",
        "else",
        "sink",
        "window",
        "tail",
    )
    for row in (*result["rows"], {"input": "all", "prompt": "", **result["summary"]}):
        table.add_row(
            f"{row['input']} {row['prompt']}".strip(),
            f"{row['agreement']:.1%}",
            number(row["margin_at_flips"]),
            number(row["margin_elsewhere"]),
            *(percent(row["mass"][band]) for band in ("sink", "window", "tail")),
        )
    return table


def curve_table(result: dict[str, Any]) -> Table:
    table = new_table("by window", "window", "same", "95 %", "KL", "read changed by")
    for row in result["curve"]:
        table.add_row(f"{row['window']:,}", *change_cells(row))
    return table


def perturbation_table(result: dict[str, Any]) -> Table:
    table = new_table("values changed", "what", "same", "95 %", "KL", "read changed by")
    for name, row in result["summary"]["perturbations"].items():
        table.add_row(name.replace("_", " "), *change_cells(row))
    return table


def change_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    low, high = row["interval"]
    return (
        f"{row['agreement']:.1%}",
        f"{low:.1%}-{high:.1%}",
        f"{row['kl']:.4f}",
        percent(row["read_change"]),
    )


def summary_lines(result: dict[str, Any]) -> list[str]:
    summary = result["summary"]
    by_draft = ", ".join(f"{entry['agreement']:.1%}" for entry in summary["by_draft"])
    lines = [f"Same top-1 by draft position: {by_draft}."]
    if summary["right_native"] is not None:
        lines.append(
            f"Drafts that the target made too, of {summary['right_drafts']} after right ones: "
            f"native {summary['right_native']:.1%}, windowed {summary['right_windowed']:.1%}."
        )
    if summary["router_jaccard"] is not None:
        lines.append(
            f"Experts chosen alike by both reads: Jaccard {summary['router_jaccard']:.2f}."
        )
    norms = summary["value_norm"]
    shown = ", ".join(f"{band} {number(value)}" for band, value in norms.items())
    lines.append(f"Mean norm of values: {shown}.")
    if summary["tail_entropy"] is None:
        lines.append("No key lies outside sink and window.")
    else:
        lines.append(
            f"In the tail, {summary['tail_keys']:,.0f} keys: entropy {summary['tail_entropy']:.2f} "
            f"nats ({percent(summary['tail_entropy_share'])} of the most), as many as "
            f"{summary['tail_participation']:,.0f} equal keys."
        )
    return lines


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
