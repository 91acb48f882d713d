"""``wmtp bench attention``: the kernel against PyTorch's."""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

from rich.console import Console

from tllm_wmtp.cli import arguments
from tllm_wmtp.cli.bench import output


def add_parser(kinds: argparse._SubParsersAction[Any]) -> None:
    attention = kinds.add_parser("attention", help="the attention kernel against PyTorch's")
    attention.add_argument(
        "--contexts", type=arguments.key_counts, default="64k,256k,1m", help="numbers of keys"
    )
    attention.add_argument("--repeats", type=arguments.positive, default=9, help="runs per row")
    output.add_output(attention)
    attention.set_defaults(run=run_attention)


def run_attention(args: argparse.Namespace) -> int:
    from tllm_wmtp import machine
    from tllm_wmtp.bench.attention import attention_table, run_attention_bench

    output.need_two(args.repeats)
    console = Console(stderr=True)

    def announce(row: dict[str, Any]) -> None:
        console.print(
            f"{row['kv_dtype']}, {row['context']:,} keys x {row['head_dim']}, "
            f"{row['n_rows']} rows: {row['seconds'] * 1e3:.2f} ms",
            style="dim",
            highlight=False,
        )

    rows = run_attention_bench(contexts=args.contexts, n_runs=args.repeats, on_row=announce)
    result = {
        "benchmark": "attention",
        "config_hash": _hash_of(args),
        **machine.describe(),
        "rows": rows,
    }
    output.write(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(attention_table(rows))
    return 0


def _hash_of(args: argparse.Namespace) -> str:
    content = json.dumps({"contexts": args.contexts, "repeats": args.repeats})
    return hashlib.sha256(content.encode()).hexdigest()[:12]
