"""A windowed step from a native one: ``step_windowed = step_native - Delta``.

``Delta(gamma) = (t_ctx_n - t_ctx_w) + gamma * (t_fwd_n - t_fwd_w)`` is what the window takes off
the draft phase; the model holds if the verify costs the same in both arms and each forward the same
at every depth. Delta comes from the timers of the even repetitions and of all depths, the two steps
from the odd ones, so that no time is on both sides.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tllm_wmtp.bench.common import interval_of
from tllm_wmtp.bench.latency_fit.regression import Estimate, fit_straight
from tllm_wmtp.bench.latency_fit.repetitions import RESAMPLES, Rounds, Sweep, Timers
from tllm_wmtp.bench.latency_fit.student import t_quantile

#: Depths for a line through all of them but one, with an interval.
LEAST_DEPTHS = 4


def predict(native: Sweep, windowed: Sweep, seed: int = 0) -> list[dict[str, Any]]:
    """One prediction per depth; intervals resample the repetitions of both halves."""
    even, odd = list(native.rounds)[0::2], list(native.rounds)[1::2]
    chance = random.Random(seed)
    drawn = [
        (
            _difference(native, windowed, chance.choices(even, k=len(even))),
            chance.choices(odd, k=len(odd)),
        )
        for _ in range(RESAMPLES)
    ]
    difference = _difference(native, windowed, even)
    return [_prediction(native, windowed, depth, difference, odd, drawn) for depth in native.depths]


def _difference(native: Sweep, windowed: Sweep, rounds: Rounds) -> Timers:
    """What the window takes off ``t_fwd`` and ``t_ctx``."""
    more, less = native.timers(rounds), windowed.timers(rounds)
    return Timers(more.fwd_ms - less.fwd_ms, more.ctx_ms - less.ctx_ms)


def _prediction(
    native: Sweep,
    windowed: Sweep,
    depth: int,
    difference: Timers,
    odd: Rounds,
    drawn: Sequence[tuple[Timers, Rounds]],
) -> dict[str, Any]:
    def step_of(sweep: Sweep, rounds: Rounds) -> float:
        return statistics.median(sweep.step_ms[depth][r] for r in rounds)

    def error_of(delta: float, rounds: Rounds) -> float:
        return (step_of(native, rounds) - delta) / step_of(windowed, rounds) - 1

    delta = difference.draft_ms(depth - 1)
    deltas = [each.draft_ms(depth - 1) for each, _ in drawn]
    errors = [error_of(d, rounds) for d, (_, rounds) in zip(deltas, drawn, strict=True)]
    verify = [statistics.median(s.verify_ms[depth][r] for r in odd) for s in (native, windowed)]
    return {
        "context": native.context,
        "depth": depth,
        "delta_ms": delta,
        "delta_ms_interval": interval_of(deltas),
        "native_step_ms": step_of(native, odd),
        "windowed_step_ms": step_of(windowed, odd),
        "predicted_windowed_step_ms": step_of(native, odd) - delta,
        "relative_error": error_of(delta, odd),
        "relative_error_interval": interval_of(errors),
        "verify_native_minus_windowed_ms": verify[0] - verify[1],
    }


def predict_left_out(
    context: int, native: Mapping[int, float], windowed: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Predictions without timers, from ``{depth: step_ms}``: Delta of a depth is where the line
    through the differences ``native - windowed`` of all other depths meets it. The verify, with its
    jump, is in both steps and leaves the difference a line. Its interval is that of one more point
    on the line. Empty with fewer than four depths in common.
    """
    depths = sorted(native.keys() & windowed.keys())
    if len(depths) < LEAST_DEPTHS:
        return []
    found = []
    for depth in depths:
        others = [other for other in depths if other != depth]
        delta = _next_point(
            [other - 1 for other in others],
            [native[other] - windowed[other] for other in others],
            depth - 1,
        )
        predicted = native[depth] - delta.value
        found.append(
            {
                "context": context,
                "depth": depth,
                "delta_ms": delta.value,
                "delta_ms_interval": delta.interval,
                "native_step_ms": native[depth],
                "windowed_step_ms": windowed[depth],
                "predicted_windowed_step_ms": predicted,
                "relative_error": predicted / windowed[depth] - 1,
                "relative_error_interval": [
                    (native[depth] - delta.high) / windowed[depth] - 1,
                    (native[depth] - delta.low) / windowed[depth] - 1,
                ],
            }
        )
    return found


def _next_point(xs: Sequence[int], ys: Sequence[float], x: int) -> Estimate:
    """Where another measurement at ``x`` is expected, with its 95 % prediction interval."""
    line, n = fit_straight(xs, ys), len(xs)
    mean = sum(xs) / n
    spread = sum((each - mean) ** 2 for each in xs)
    left = sum((y - line.at(each)) ** 2 for each, y in zip(xs, ys, strict=True))
    error = (left / (n - 2) * (1 + 1 / n + (x - mean) ** 2 / spread)) ** 0.5
    half = t_quantile(0.975, n - 2) * error
    return Estimate(line.at(x), line.at(x) - half, line.at(x) + half)
