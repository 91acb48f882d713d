"""From a measured cell to its row, and whether rows that must agree do."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tllm_wmtp.bench import inputs
from tllm_wmtp.bench.sweep.cells import Cell
from tllm_wmtp.bench.sweep.protocol import (
    Answer,
    Iteration,
    acceptance,
    is_degenerate,
    select,
    timing,
)
from tllm_wmtp.bench.sweep.rows import SCHEMA, Row
from tllm_wmtp.bench.sweep.target import Measured

UNSEEN = "the target does not show it"
#: Of a cell's configuration, what must not change the output.
OF_THE_ARM = ("arm", "depth", "window", "n_sink")


def row_of(cell: Cell, measured: Measured, about: Mapping[str, Any]) -> Row:
    """The row of a cell.

    Args:
        about: what :func:`tllm_wmtp.machine.describe` says.

    Raises:
        ConfigError: a value is not finite, or a reason is not given.
    """
    answers = measured.answers
    counted = [each for each in answers if not is_degenerate(_sequence(each))]
    accepted = acceptance(counted)
    selection = select(measured.iterations)
    times = timing(selection, counted, accepted.al)
    tpot_ms = _ms(times.tpot_s)
    batch = selection.effective_batch
    step_ms = _median_ms(selection.kept, "seconds")
    floor, bandwidth = measured.floor, None if measured.floor is None else measured.floor.bandwidth
    floor_ms = None
    if floor is not None and bandwidth is not None:
        floor_ms = floor.bytes_moved / bandwidth * 1e3
    first = [each.ttft_s for each in answers if each.ttft_s is not None]
    draft_kv = [each.draft_kv_bytes for each in answers if each.draft_kv_bytes is not None]
    values: dict[str, Any] = {
        "n_runs": len(answers),
        "prompt_tokens": sum(each.prompt_tokens for each in answers),
        "output_tokens": sum(each.output_tokens for each in answers),
        "steps": len(measured.iterations),
        "steps_kept": len(selection.kept),
        "steps_clipped": selection.clipped,
        "steps_ramp": selection.ramp,
        "screened": len(answers) - len(counted),
        "accepted_histogram": accepted.histogram,
        "alpha": None
        if accepted.alpha is None
        else [
            {
                "value": each.value if each.trials else None,
                "interval": list(each.interval),
                "trials": each.trials,
            }
            for each in accepted.alpha
        ],
        "al": accepted.al,
        "al_interval": accepted.al_interval,
        "b_eff": batch,
        "t_iter_ms": _ms(times.t_iter_s),
        "t_iter_ms_interval": _interval_ms(times.t_iter_interval),
        "tpot_ms": tpot_ms,
        "tpot_ms_interval": _interval_ms(times.tpot_interval),
        "tokens_per_s": batch / tpot_ms * 1e3 if batch and tpot_ms else None,
        "ttft_s": statistics.median(first) if first else None,
        "step_ms": step_ms,
        "draft_ms": _median_ms(selection.kept, "draft_s"),
        "verify_ms": _median_ms(selection.kept, "verify_s"),
        "ctx_ms": _median_ms(selection.kept, "ctx_s"),
        "fwd_ms": _median_ms(selection.kept, "fwd_s"),
        "draft_kv_bytes": max(draft_kv) if draft_kv else None,
        "bytes_moved": None if floor is None else floor.bytes_moved,
        "floor_ms": floor_ms,
        "fraction_of_floor": floor_ms / step_ms if floor_ms and step_ms else None,
        "read_bandwidth_gb_per_s": None if bandwidth is None else bandwidth / 1e9,
        "score": _score(measured.prompts, answers),
        "output_digest": output_digest(answers),
    }
    return Row(
        benchmark="run",
        schema=SCHEMA,
        config_hash=cell.digest,
        config=cell.config,
        arm=cell.arm,
        model=Path(cell.model).name or cell.model,
        target=cell.target.kind,
        input=cell.input.task,
        difficulty=cell.input.difficulty,
        context=cell.context,
        depth=cell.depth,
        window=cell.window,
        n_sink=cell.n_sink,
        dtype=cell.dtype,
        kv_dtype=cell.kv_dtype,
        batch=cell.batch,
        max_tokens=cell.sampling.max_tokens,
        temperature=cell.sampling.temperature,
        seed=cell.seed,
        **{**about, **measured.device},
        **values,
        missing=_reasons(values, measured, counted),
    )


def _sequence(answer: Answer) -> Sequence[int | str]:
    """What may repeat itself: token ids, or words where these are unseen."""
    return (answer.text or "").split() if answer.token_ids is None else answer.token_ids


def output_digest(answers: Iterable[Answer]) -> str | None:
    """SHA-256 of all output token ids in the order of the requests; None where they are unseen."""
    ids = [each.token_ids for each in answers]
    if any(each is None for each in ids):
        return None
    return hashlib.sha256(json.dumps([list(each or ()) for each in ids]).encode()).hexdigest()


def differing(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups of rows whose outputs should be the same, and are not.

    Greedy requests only: the same prompts, the same model and types, whatever the arm, its depth,
    window and sinks, and whatever the address of the server.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.output_digest is not None and row.temperature == 0:
            groups.setdefault(_output_key(row), []).append(row)
    return [group for group in groups.values() if len({row.output_digest for row in group}) > 1]


def _output_key(row: Row) -> str:
    config = {key: value for key, value in row.config.items() if key not in OF_THE_ARM}
    return json.dumps(config | {"target": row.target}, sort_keys=True)


def _score(prompts: Sequence[inputs.Prompt], answers: Sequence[Answer]) -> float | None:
    """Mean over the requests; None where nothing is expected or the text is unseen."""
    scores = [
        None if each.text is None else inputs.score(prompt, each.text)
        for prompt, each in zip(prompts, answers, strict=True)
    ]
    known = [share for share in scores if share is not None]
    return statistics.fmean(known) if known and len(known) == len(scores) else None


def _reasons(
    values: Mapping[str, Any], measured: Measured, counted: Sequence[Answer]
) -> dict[str, str]:
    """Why each null is one: what the target said of it, or what the numbers say."""
    stepped = [each for each in counted if each.steps]
    known = {
        "al_interval": "one request has no spread between requests",
        "tpot_ms_interval": "one request has no spread between requests",
        "t_iter_ms_interval": "one iteration has no spread",
        "score": "the task has no expected answer",
    }
    if not any(each.steps for each in measured.answers):
        nothing = "no request made a second token, so there was no step"
        known |= dict.fromkeys(values, nothing)
    elif not stepped:
        nothing = "every output ended in degenerate repetition"
        known |= dict.fromkeys(
            ("accepted_histogram", "alpha", "al", "al_interval", "tpot_ms", "tpot_ms_interval",
             "tokens_per_s"),
            nothing,
        )  # fmt: skip
    return {
        name: measured.missing.get(name, known.get(name, UNSEEN))
        for name, value in values.items()
        if value is None
    }


def _median_ms(iterations: Sequence[Iteration], name: str) -> float | None:
    seconds = [getattr(each, name) for each in iterations]
    if not seconds or any(each is None for each in seconds):
        return None
    return statistics.median(seconds) * 1e3


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _interval_ms(seconds: Sequence[float] | None) -> list[float] | None:
    return None if seconds is None else [each * 1e3 for each in seconds]
