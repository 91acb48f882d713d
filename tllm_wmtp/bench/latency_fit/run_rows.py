"""The same lines through rows of ``wmtp bench run``: ``t_iter_ms`` of real requests, any target.

A point is one depth: the median over all rows of its arm and context, whatever their input, since
the time of an iteration does not depend on the text. Prompts of one context differ by a few tokens,
so contexts within 2 % of each other are one.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tllm_wmtp.bench.latency_fit.predictions import predict_left_out
from tllm_wmtp.bench.latency_fit.regression import LEAST_POINTS, fit_with_jump, line_json
from tllm_wmtp.bench.sweep.rows import Row, read_rows
from tllm_wmtp.errors import ConfigError

ARMS = ("native", "windowed")
#: What all rows must have in common, because a line goes through one setup.
SETUP = (
    "model", "target", "batch", "dtype", "kv_dtype", "device", "processor", "threads", "isa",
)  # fmt: skip
#: The same, of the windowed arm.
WINDOW = ("window", "n_sink")
PHASES = ("draft_ms", "verify_ms", "ctx_ms", "fwd_ms")
SAME_CONTEXT = 0.02
#: Beyond these a row is a slip of whoever wrote it; squares of such numbers might not be numbers.
MOST_DEPTH, MOST_CONTEXT, MOST_STEP_MS = 1024, 1 << 40, 1e9


def fit_run_rows(files: Sequence[Path], where: Mapping[str, str]) -> dict[str, Any]:
    """Rows of ``files``, of which only those count whose fields read as ``where`` says.

    Raises:
        ConfigError: a file is no rows, rows of several setups, or too few depths for any line.
    """
    rows = [row for file in files for row in read_rows(file)]
    chosen = [row for row in rows if _matches(row, where)]
    arms = [row for row in chosen if row.arm in ARMS]
    timed = [row for row in arms if row.t_iter_ms is not None]
    if not timed:
        raise ConfigError(
            f"{len(rows)} rows, {len(chosen)} of them chosen",
            "a line needs rows of the native or the windowed arm that have t_iter_ms",
            "pass files of wmtp bench run with such rows, or change --where",
        )
    for row in timed:
        _check(row)
    setup = {name: _only(name, timed) for name in SETUP}
    windowed = [row for row in timed if row.arm == "windowed"]
    window = {name: _only(name, windowed) if windowed else None for name in WINDOW}
    groups = _by_context(timed)
    fits: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    predictions: list[dict[str, Any]] = []
    left_out: list[str] = []
    for context, members in groups.items():
        times: dict[str, dict[int, float]] = {}
        for arm in ARMS:
            depths = _by_depth([row for row in members if row.arm == arm])
            times[arm] = {depth: _milliseconds(some) for depth, some in depths.items()}
            cells += [_cell(arm, context, depth, some) for depth, some in depths.items()]
            if len(depths) >= LEAST_POINTS:
                fits.append(_fit(arm, context, times[arm]))
            elif depths:
                left_out.append(
                    f"{arm} at {context:,} tokens: {len(depths)} depths, a line needs "
                    f"{LEAST_POINTS}"
                )
        predictions += predict_left_out(context, times["native"], times["windowed"])
    if not fits:
        raise ConfigError(
            "; ".join(left_out),
            "an arm and context needs three depths or more",
            "measure more depths, or pass more files",
        )
    return {
        "benchmark": "fit",
        "config_hash": _hash(timed),
        "source": f"t_iter_ms * b_eff of {len(timed)} rows of wmtp bench run",
        "date": max(row.date for row in timed),
        **setup,
        **window,
        "contexts": list(groups),
        "depths": sorted({row.depth for row in timed}),
        "rows": cells,
        "fits": fits,
        "predictions": predictions,
        "left_out": left_out,
        "missing": {}
        if predictions
        else {"predictions": "they need four depths of both arms at one context"},
    }


def _matches(row: Row, where: Mapping[str, str]) -> bool:
    known = asdict(row)
    for name, wanted in where.items():
        if name in WINDOW and row.arm != "windowed":
            continue  # the other arms have no window to choose
        if name not in known:
            raise ConfigError(
                f"--where {name}={wanted}",
                "a row has no such field",
                f"use one of {', '.join(sorted(SETUP + WINDOW + ('input', 'context', 'arm')))}",
            )
        if str(known[name]) != wanted:
            return False
    return True


def _only(name: str, rows: Sequence[Row]) -> Any:
    values = {getattr(row, name) for row in rows}
    if len(values) > 1:
        depths = {v: len({r.depth for r in rows if getattr(r, name) == v}) for v in values}
        most = max(sorted(values, key=str), key=depths.__getitem__)
        raise ConfigError(
            f"rows of {name} {', '.join(sorted(map(str, values)))}",
            "a line goes through rows of one setup",
            f"choose one, for example --where {name}={most}, which has the most depths",
        )
    return values.pop()


def _by_context(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows by the median of their contexts; a group reaches 2 % up from its shortest."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.context):
        if groups and row.context <= groups[-1][0].context * (1 + SAME_CONTEXT):
            groups[-1].append(row)
        else:
            groups.append([row])
    return {statistics.median_low(row.context for row in group): group for group in groups}


def _by_depth(rows: Sequence[Row]) -> dict[int, list[Row]]:
    return {
        depth: [row for row in rows if row.depth == depth]
        for depth in sorted({row.depth for row in rows})
    }


def _milliseconds(rows: Sequence[Row]) -> float:
    """Of an iteration of the whole batch."""
    return statistics.median(_step(row) for row in rows)


def _check(row: Row) -> None:
    """Refuses numbers that no run gives, before anything is divided by them."""
    for name, value, least, most in (
        ("depth", row.depth, 2, MOST_DEPTH),
        ("context", row.context, 1, MOST_CONTEXT),
        ("b_eff", row.b_eff, 1, 1 << 20),
    ):
        if value is None or not least <= value <= most:
            raise ConfigError(
                f"{name} {value} of row {row.config_hash}",
                f"a row of the {row.arm} arm with t_iter_ms has {least} to {most}",
                "make the file again",
            )
    if not 0 < _step(row) <= MOST_STEP_MS:
        raise ConfigError(
            f"t_iter_ms {row.t_iter_ms} of row {row.config_hash}",
            f"an iteration takes more than 0 ms and at most {MOST_STEP_MS:.0f}",
            "make the file again",
        )


def _step(row: Row) -> float:
    """Of a row that has both (:func:`_check`)."""
    return (row.t_iter_ms or 0.0) * (row.b_eff or 0)


def _fit(arm: str, context: int, times: Mapping[int, float]) -> dict[str, Any]:
    gammas = [depth - 1 for depth in times]
    return {
        "arm": arm,
        "context": context,
        "gammas": gammas,
        **line_json(fit_with_jump(gammas, list(times.values()))),
    }


def _cell(arm: str, context: int, depth: int, rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over the rows; intervals are the rows' lowest and highest."""
    steps = [_step(row) for row in rows]
    cell: dict[str, Any] = {
        "arm": arm,
        "context": context,
        "depth": depth,
        "gamma": depth - 1,
        "n_runs": sum(row.n_runs for row in rows),
        "n_rows": len(rows),
        "step_ms": statistics.median(steps),
        "step_ms_interval": [min(steps), max(steps)],
    }
    missing = {}
    for name in PHASES:
        seen = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        cell[name] = statistics.median(seen) if seen else None
        cell[f"{name}_interval"] = [min(seen), max(seen)] if seen else None
        if not seen:
            missing[name] = rows[0].missing[name]
    return {**cell, "missing": missing} if missing else cell


def _hash(rows: Sequence[Row]) -> str:
    content = "".join(sorted(row.line() for row in rows))
    return hashlib.sha256(content.encode()).hexdigest()[:12]
