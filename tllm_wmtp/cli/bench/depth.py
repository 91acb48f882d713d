"""``wmtp bench depth``: fixed depths against the adaptive one."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.cli.bench import output
from tllm_wmtp.config import MtpConfig


def add_parser(kinds: argparse._SubParsersAction[Any]) -> None:
    depth = kinds.add_parser("depth", help="fixed depths against the adaptive one, on real prompts")
    depth.add_argument("--model", default="demo", help="checkpoint directory (default demo)")
    depth.add_argument("--context", type=arguments.context, default="64k", help="default 64k")
    depth.add_argument(
        "--max-tokens", type=arguments.positive, default=256, help="output per prompt (256)"
    )
    depth.add_argument(
        "--depths", type=arguments.key_counts, default="2,3,4,5,6,7", help="fixed ones (2,3,..,7)"
    )
    depth.add_argument(
        "--max-depth", type=arguments.count, default=7, help="of the adaptive arm (default 7)"
    )
    depth.add_argument(
        "--prompts", type=arguments.positive, default=2, help="per workload (default 2)"
    )
    arguments.add_window(depth)
    output.add_output(depth)
    depth.set_defaults(run=run_depth)


def run_depth(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench.depth import DepthBench, run_depth_bench

    for depth in (*args.depths, args.max_depth):
        MtpConfig(depth, args.window, args.sink)
    bench = DepthBench(
        model=arguments.model_directory(args.model),
        context=args.context,
        max_tokens=args.max_tokens,
        depths=tuple(args.depths),
        max_depth=args.max_depth,
        window=args.window,
        n_sink=args.sink,
        prompts=args.prompts,
    )
    result = output.with_progress(partial(run_depth_bench, bench), "{task.description}")
    output.write(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(depth_table(result))
        for line in depth_lines(result):
            print(line)
    return 0 if result["lossless"] else 1


def depth_table(result: dict[str, Any]) -> Table:
    table = output.table(
        f"{result['context']:,} tokens, window {result['window']}, {result['prompts']} "
        f"prompts each, {result['threads']} threads"
    )
    for name in ("text", "depth"):
        table.add_column(name, no_wrap=True)
    for name in ("AL", "TPOT ms", "ms/token", "mean depth", "over adaptive"):
        table.add_column(name, justify="right", no_wrap=True)
    ratios = {(entry["workload"], entry["arm"]): entry for entry in result["ratios"]}
    for row in result["rows"]:
        over = ratios.get((row["workload"], row["arm"]))
        shown = "1"
        if over is not None:
            low, high = over["interval"]
            shown = f"{over['over_adaptive']:.2f} ({low:.2f}-{high:.2f})"
        table.add_row(
            row["workload"],
            row["arm"].removeprefix("depth "),
            f"{row['al']:.2f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['ms_per_token']:.2f}",
            f"{row['mean_depth']:.1f}",
            shown,
            end_section=over is None,
        )
    return table


def depth_lines(result: dict[str, Any]) -> list[str]:
    """The adaptive arm against the fixed depth that was best on each workload."""
    lines = []
    for workload in dict.fromkeys(entry["workload"] for entry in result["ratios"]):
        best = min(
            (entry for entry in result["ratios"] if entry["workload"] == workload),
            key=lambda entry: entry["over_adaptive"],
        )
        low, high = best["interval"]
        lines.append(
            f"{workload}: the best fixed arm, {best['arm']}, takes {best['over_adaptive']:.2f} of "
            f"the adaptive one's time ({low:.2f}-{high:.2f})"
        )
    if not result["lossless"]:
        lines.append("the arms' outputs are NOT identical")
    return lines
