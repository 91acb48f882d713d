"""``wmtp bench step`` and ``wmtp bench attention``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    kinds = commands.add_parser("bench", help="measure").add_subparsers(
        dest="bench", metavar="WHAT", required=True
    )
    step = kinds.add_parser("step", help="draft and verify time of one step, per arm and context")
    step.add_argument("--model", default="demo", help="checkpoint directory (default demo)")
    step.add_argument(
        "--contexts",
        type=arguments.contexts,
        default="16k,64k,256k,1m",
        help="separated by commas (default 16k,64k,256k,1m; 1m is 1,040,000)",
    )
    arguments.add_speculation(step)
    arguments.add_types(step)
    step.add_argument("--repeats", type=arguments.positive, default=15, help="steps per row")
    _add_output(step)
    step.set_defaults(run=run_step)

    attention = kinds.add_parser("attention", help="the attention kernel against PyTorch's")
    attention.add_argument(
        "--contexts", type=arguments.key_counts, default="64k,256k,1m", help="numbers of keys"
    )
    attention.add_argument("--repeats", type=arguments.positive, default=9, help="runs per row")
    _add_output(attention)
    attention.set_defaults(run=run_attention)


def _add_output(parser: argparse.ArgumentParser) -> None:
    arguments.add_json(parser)
    parser.add_argument("--out", type=Path, help="a folder that also gets the JSON, as a file")


def run_step(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench.step import StepBench, run_step_bench

    # Every bad option is refused here, before the model is loaded.
    for arm in arguments.ARMS:
        arguments.speculation(arm, args)
    _need_two(args.repeats)
    bench = StepBench(
        model=arguments.model_directory(args.model),
        contexts=tuple(args.contexts),
        depth=args.depth,
        window=args.window,
        n_sink=args.sink,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        repeats=args.repeats,
    )
    console = Console(stderr=True)
    with Progress(
        TextColumn("context {task.description}"),
        BarColumn(),
        TextColumn("{task.completed} / {task.total} rounds"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done)

        result = run_step_bench(bench, advance)
    _write(args.out, f"step-{result['config_hash']}.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(step_table(result))
        for line in ratio_lines(result):
            print(line)
    return 0


def run_attention(args: argparse.Namespace) -> int:
    from tllm_wmtp import machine
    from tllm_wmtp.bench.attention import attention_table, run_attention_bench

    _need_two(args.repeats)
    console = Console(stderr=True)

    def announce(row: dict[str, Any]) -> None:
        console.print(
            f"{row['kv_dtype']}, {row['context']:,} keys x {row['head_dim']}, "
            f"{row['n_rows']} rows: {row['seconds'] * 1e3:.2f} ms",
            style="dim",
            highlight=False,
        )

    rows = run_attention_bench(contexts=args.contexts, n_runs=args.repeats, on_row=announce)
    result = {"benchmark": "attention", **machine.describe(), "rows": rows}
    _write(args.out, f"attention-{_hash_of(args)}.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(attention_table(rows))
    return 0


def _need_two(repeats: int) -> None:
    if repeats < 2:
        raise ConfigError(
            f"repeats {repeats}", "an interval needs two runs or more", "raise --repeats"
        )


def _hash_of(args: argparse.Namespace) -> str:
    import hashlib

    content = json.dumps({"contexts": args.contexts, "repeats": args.repeats})
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _write(folder: Path | None, name: str, result: dict[str, Any]) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}",
            f"the folder cannot be written ({error.strerror})",
            "choose another one",
        ) from error


def step_table(result: dict[str, Any]) -> Table:
    first = result["rows"][0]
    table = Table(
        title=f"one step, depth {first['depth']}, window {first['window']}, sink "
        f"{first['n_sink']}, KV {first['kv_dtype']}, {first['threads']} threads",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for name in ("step ms", "quartiles", "draft", "verify", "MB", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        low, high = row["step_ms_interquartile"]
        table.add_row(
            f"{row['context']:,}",
            row["arm"],
            f"{row['step_ms']:.2f}",
            f"{low:.1f}-{high:.1f}",
            f"{row['draft_ms']:.2f}",
            f"{row['verify_ms']:.2f}",
            f"{row['bytes_moved'] / 1e6:,.0f}",
            f"{row['fraction_of_floor']:.0%}",
            end_section=row["arm"] == "windowed",
        )
    return table


def ratio_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for entry in result["ratios"]:
        low, high = entry["step_native_over_windowed_interquartile"]
        lines.append(
            f"{entry['context']:>9,} tokens: a native step costs "
            f"{entry['step_native_over_windowed']:.2f} windowed ones "
            f"({low:.2f}-{high:.2f}), its draft phase {entry['draft_native_over_windowed']:.2f}"
        )
    return lines
