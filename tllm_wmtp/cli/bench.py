"""``wmtp bench step``, ``depth``, ``prefill`` and ``attention``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.config import MtpConfig
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
    _add_output(depth)
    depth.set_defaults(run=run_depth)

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
    _add_output(prefill)
    prefill.set_defaults(run=run_prefill)

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
    result = _with_progress(partial(run_step_bench, bench), "context {task.description}")
    _write(args.out, f"step-{result['config_hash']}.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(step_table(result))
        for line in ratio_lines(result):
            print(line)
    return 0


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
    result = _with_progress(partial(run_depth_bench, bench), "{task.description}")
    _write(args.out, f"depth-{result['config_hash']}.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(depth_table(result))
        for line in depth_lines(result):
            print(line)
    return 0 if result["lossless"] else 1


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
    result = _with_progress(partial(run_prefill_bench, bench), "context {task.description}")
    _write(args.out, f"prefill-{result['config_hash']}.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(prefill_table(result))
    return 0


def _with_progress(
    run: Callable[[Callable[[str, int, int], None]], dict[str, Any]], label: str
) -> dict[str, Any]:
    """The result of ``run``, while a bar per label shows how far it is."""
    console = Console(stderr=True)
    with Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.completed} / {task.total}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        return run(advance)


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


def depth_table(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"{result['context']:,} tokens, window {result['window']}, {result['prompts']} "
        f"prompts each, {result['threads']} threads",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
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


def prefill_table(result: dict[str, Any]) -> Table:
    first = result["rows"][0]
    table = Table(
        title=f"prefill, window {first['window']}, sink {first['n_sink']}, "
        f"{first['n_runs']} runs, {first['threads']} threads",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
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
