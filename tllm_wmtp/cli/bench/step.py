"""``wmtp bench step``: the cost of one step."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.cli.bench import output


def add_parser(kinds: argparse._SubParsersAction[Any]) -> None:
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
    step.add_argument(
        "--check-content",
        action="store_true",
        help="also compare with a prompt that is really prefilled, at the shortest context",
    )
    output.add_output(step)
    step.set_defaults(run=run_step)


def run_step(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench.step import StepBench, run_step_bench

    # Every bad option is refused here, before the model is loaded.
    for arm in arguments.ARMS:
        arguments.speculation(arm, args)
    output.need_two(args.repeats)
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
    content = None
    if args.check_content:
        from tllm_wmtp.bench.content import run_content_check

        content = output.with_progress(partial(run_content_check, bench), "{task.description}")
    result = output.with_progress(partial(run_step_bench, bench), "context {task.description}")
    if content is not None:
        result["content"] = content
    output.write(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(step_table(result))
        for line in (*ratio_lines(result), *content_lines(content)):
            print(line)
    return 0


def step_table(result: dict[str, Any]) -> Table:
    first = result["rows"][0]
    table = output.table(
        f"one step, depth {first['depth']}, window {first['window']}, sink "
        f"{first['n_sink']}, KV {first['kv_dtype']}, {first['threads']} threads"
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


def content_lines(content: dict[str, Any] | None) -> list[str]:
    """What random keys and values cost over those of a real prompt."""
    if content is None:
        return []
    lines = []
    for entry in content["arms"]:
        low, high = entry["step_ratio_interval"]
        lines.append(
            f"{content['context']:>9,} tokens, {entry['arm']}: a step with random keys costs "
            f"{entry['step_ratio']:.3f} of one with prefilled ones ({low:.3f}-{high:.3f}, "
            f"{entry['pairs']} pairs)"
        )
    return lines


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
