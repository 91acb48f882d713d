"""``wmtp bench prefill``: with and without pruning."""

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
    prefill = kinds.add_parser("prefill", help="prefill with and without pruning, per arm")
    prefill.add_argument("--model", default="demo", help="checkpoint directory (default demo)")
    prefill.add_argument(
        "--contexts",
        type=arguments.contexts,
        default="4k,16k,64k",
        help="separated by commas (default 4k,16k,64k)",
    )
    arguments.add_speculation(prefill)
    prefill.add_argument("--repeats", type=arguments.positive, default=3, help="prefills per row")
    output.add_output(prefill)
    prefill.set_defaults(run=run_prefill)


def run_prefill(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench.prefill import PrefillBench, run_prefill_bench

    for arm in arguments.ARMS:
        arguments.speculation(arm, args)
    bench = PrefillBench(
        model=arguments.model_directory(args.model),
        contexts=tuple(args.contexts),
        depth=args.depth,
        window=args.window,
        n_sink=args.sink,
        repeats=args.repeats,
    )
    result = output.with_progress(partial(run_prefill_bench, bench), "context {task.description}")
    output.write(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(prefill_table(result))
    return 0


def prefill_table(result: dict[str, Any]) -> Table:
    first = result["rows"][0]
    table = output.table(
        f"prefill, window {first['window']}, sink {first['n_sink']}, "
        f"{first['n_runs']} runs, {first['threads']} threads"
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    for name in ("arm", "pruned"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT s", "quartiles", "last layer", "draft rows", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    ratios = {(entry["context"], entry["arm"]): entry for entry in result["ratios"]}
    for row in result["rows"]:
        low, high = row["ttft_s_interquartile"]
        gain = ratios[row["context"], row["arm"]]["unpruned_over_pruned"]
        table.add_row(
            f"{row['prompt_tokens']:,}",
            row["arm"],
            "yes" if row["pruned"] else "no",
            f"{row['ttft_s']:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row['last_layer_rows']:,}",
            f"{row['draft_rows']:,}",
            f"{1 - 1 / gain:.0%}" if row["pruned"] else "",
            end_section=row["arm"] == "native" and not row["pruned"],
        )
    return table
