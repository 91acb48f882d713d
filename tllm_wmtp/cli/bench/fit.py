"""``wmtp bench fit``: the latency model, fitted to a sweep over depths."""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.cli.bench import output
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.errors import ConfigError

RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
#: Depths of a range; more are a slip, and would be listed before anything is checked.
MOST_DEPTHS = 256


def depths(text: str) -> list[int]:
    """Depths separated by commas, or a range like ``2..9``; ascending."""
    found: set[int] = set()
    for part in text.split(","):
        match = RANGE.match(part.strip())
        if match is None:
            found.add(arguments.positive(part))
        elif int(match[1]) > int(match[2]):
            raise argparse.ArgumentTypeError(
                f"{part!r}: a range goes upwards; write for example 2..9"
            )
        else:
            first, last = int(match[1]), int(match[2])
            if last - first >= MOST_DEPTHS:
                raise argparse.ArgumentTypeError(
                    f"{part!r}: a range has {MOST_DEPTHS} depths or fewer; write for example 2..9"
                )
            found |= set(range(first, last + 1))
    return sorted(found)


def field_and_value(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a field and its value are expected; write for example kv_dtype=bfloat16"
        )
    return name, value


def add_parser(kinds: argparse._SubParsersAction[Any]) -> None:
    fit = kinds.add_parser("fit", help="the latency model: step time against draft length")
    fit.add_argument("--model", default="demo", help="checkpoint directory (default demo)")
    fit.add_argument(
        "--contexts",
        type=arguments.contexts,
        default="16k,64k",
        help="separated by commas (default 16k,64k)",
    )
    fit.add_argument(
        "--depths", type=depths, default="2..9", help="a range, or with commas (default 2..9)"
    )
    arguments.add_window(fit)
    arguments.add_types(fit)
    fit.add_argument(
        "--repeats", type=arguments.positive, default=120, help="steps per depth (default 120)"
    )
    fit.add_argument(
        "--rows",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing; fit rows of wmtp bench run",
    )
    fit.add_argument(
        "--where",
        type=field_and_value,
        action="append",
        metavar="FIELD=VALUE",
        help="with --rows: only rows whose field has this value",
    )
    output.add_output(fit)
    fit.set_defaults(run=run_fit)


def run_fit(args: argparse.Namespace) -> int:
    result = _measured(args) if args.rows is None else _of_rows(args)
    output.write(args.out, result)
    if args.json:
        print(json.dumps(result, allow_nan=False))
        return 0
    console = Console()
    console.print(fit_table(result))
    if result["predictions"]:
        console.print(prediction_table(result))
    for line in fit_lines(result):
        print(line)
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    if args.where:
        raise ConfigError(
            f"--where {'='.join(args.where[0])}",
            "it chooses rows of a file, and none is given",
            "add --rows, or leave it out",
        )
    for depth in args.depths:
        MtpConfig(depth, args.window, args.sink)
    from tllm_wmtp.bench.latency_fit.measure import FitBench, run_fit_bench

    bench = FitBench(
        model=arguments.model_directory(args.model),
        contexts=tuple(args.contexts),
        depths=tuple(args.depths),
        window=args.window,
        n_sink=args.sink,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        repeats=args.repeats,
    )
    return output.with_progress(partial(run_fit_bench, bench), "context {task.description}")


def _of_rows(args: argparse.Namespace) -> dict[str, Any]:
    from tllm_wmtp.bench.latency_fit.run_rows import fit_run_rows

    where: dict[str, str] = {}
    for name, value in args.where or ():
        if where.setdefault(name, value) != value:
            raise ConfigError(
                f"--where {name}={value}",
                f"a row has one {name}, and {where[name]} is asked for as well",
                "give one value for each field",
            )
    return fit_run_rows(args.rows, where)


def fit_table(result: dict[str, Any]) -> Table:
    table = output.table(
        f"ms of a step by draft length: {result['model']}, window {result['window']}, "
        f"{result['threads']} threads"
    )
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for name in ("slope", "95 %", "t_fwd", "intercept", "R2", "jump"):
        table.add_column(name, justify="right", no_wrap=True)
    for fit in result["fits"]:
        jump, timers = fit["break"], fit.get("timers")
        table.add_row(
            f"{fit['context']:,}",
            fit["arm"],
            f"{fit['slope_ms']:.2f}",
            _interval(fit["slope_ms_interval"]),
            "" if timers is None else f"{timers['t_fwd_ms']:.2f}",
            f"{fit['intercept_ms']:.2f}",
            f"{fit['r_squared']:.3f}",
            "" if jump is None else f"{jump['jump_ms']:.2f} at {jump['gamma']}",
            end_section=fit["arm"] == "windowed",
        )
    return table


def prediction_table(result: dict[str, Any]) -> Table:
    table = output.table("windowed step = native step - Delta, in ms")
    for name in ("context", "depth", "Delta", "native", "predicted", "measured", "error", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in result["predictions"]:
        low, high = entry["relative_error_interval"]
        table.add_row(
            f"{entry['context']:,}",
            str(entry["depth"]),
            f"{entry['delta_ms']:.2f}",
            f"{entry['native_step_ms']:.2f}",
            f"{entry['predicted_windowed_step_ms']:.2f}",
            f"{entry['windowed_step_ms']:.2f}",
            f"{entry['relative_error']:+.1%}",
            f"{low:+.1%} to {high:+.1%}",
        )
    return table


def fit_lines(result: dict[str, Any]) -> list[str]:
    """Where lines and timers disagree, and what was left out."""
    lines = list(result.get("left_out", ()))
    for fit in result["fits"]:
        for entry in fit.get("agreement", ()):
            if not entry["agrees"]:
                lines.append(
                    f"{fit['arm']}, {fit['context']:,} tokens: {entry['quantity']} does not agree: "
                    f"{entry['fitted_ms']:.3f} ms fitted, {entry['timers_ms']:.3f} ms by timers"
                )
    return lines


def _interval(interval: list[float]) -> str:
    return f"{interval[0]:.2f}-{interval[1]:.2f}"
