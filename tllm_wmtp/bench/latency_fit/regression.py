"""A line through few points with honest intervals, and whether a jump cuts it in two.

The points are medians, one per draft length, and the intervals come from how far they lie from the
line (Student's t), so they hold the departure from the model as well as the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.bench.latency_fit.student import f_tail, t_quantile
from tllm_wmtp.latency import fit_line

#: A jump is believed if such a fit, or a better one, has at most this probability without one.
SIGNIFICANT = 0.05
#: Points on each side of a jump.
LEAST_BESIDE = 2
#: Points for a line with intervals, and for a jump in one: one more than the parameters, and two.
LEAST_POINTS, LEAST_FOR_A_JUMP = 3, 5
#: Residuals below this share of the values are rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> list[float]:
        return [self.low, self.high]

    def overlaps(self, other: Estimate) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Jump:
    """From ``x`` on the values are higher by ``height``; ``p_value`` as in :func:`find_jump`."""

    x: float
    height: Estimate
    p_value: float


@dataclass(frozen=True)
class FittedLine:
    """``intercept + slope * x``, plus the jump's height from the jump on.

    ``p_value`` is that of the best jump, taken or not; None where there were too few points to
    look for one.
    """

    slope: Estimate
    intercept: Estimate
    r_squared: float
    jump: Jump | None = None
    p_value: float | None = None

    def at(self, x: float) -> float:
        height = self.jump.height.value if self.jump is not None and x >= self.jump.x else 0.0
        return self.intercept.value + self.slope.value * x + height


def fit_straight(xs: Sequence[float], ys: Sequence[float]) -> FittedLine:
    """Ordinary least squares with 95 % intervals (t of n - 2 degrees of freedom).

    Raises:
        ValueError: fewer than three points, or all of them at one x.
    """
    _check(xs, ys)
    line, n = fit_line(xs, ys), len(xs)
    mean = sum(xs) / n
    spread = sum((x - mean) ** 2 for x in xs)
    left = _settled(sum((y - line.at(x)) ** 2 for x, y in zip(xs, ys, strict=True)), ys)
    variance, t = left / (n - 2), t_quantile(0.975, n - 2)
    slope_half = t * math.sqrt(variance / spread)
    intercept_half = t * math.sqrt(variance * (1 / n + mean**2 / spread))
    return FittedLine(
        _around(line.slope, slope_half), _around(line.intercept, intercept_half), line.r_squared
    )


def fit_with_jump(xs: Sequence[float], ys: Sequence[float]) -> FittedLine:
    """:func:`fit_straight`, or the line with the jump that :func:`find_jump` believes."""
    straight = fit_straight(xs, ys)
    found = find_jump(xs, ys)
    if found is None:
        return straight
    at, p_value = found
    if p_value > SIGNIFICANT:
        return FittedLine(straight.slope, straight.intercept, straight.r_squared, None, p_value)
    fit = _jump_at(xs, ys, at)
    t = t_quantile(0.975, len(xs) - 3)
    intercept, slope, height = (
        _around(value, t * math.sqrt(fit.left / (len(xs) - 3) * unit))
        for value, unit in zip(fit.values, fit.units, strict=True)
    )
    mean = sum(ys) / len(ys)
    whole = sum((y - mean) ** 2 for y in ys)
    return FittedLine(
        slope,
        intercept,
        1 - fit.left / whole if whole else 1.0,
        Jump(at, height, p_value),
        p_value,
    )


def find_jump(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """Where a jump explains most, and how likely that is if there is none.

    Every x with two draft lengths or more before it, and from it on, is tried: one slope, and a
    jump of any size there. The F test (1 and n - 3 degrees of freedom) of the best place is
    corrected for the number of places (Bonferroni), so under independent normal noise of one
    variance a line without a jump gets one in at most 5 of 100 cases.

    Returns:
        ``(x, p)``; None if there are fewer than five points or no such place.
    """
    _check(xs, ys)
    ordered = sorted(set(xs))
    places = ordered[LEAST_BESIDE : len(ordered) - LEAST_BESIDE + 1]
    degrees = len(xs) - 3
    if not places or len(xs) < LEAST_FOR_A_JUMP:
        return None
    line = fit_line(xs, ys)
    without = _settled(sum((y - line.at(x)) ** 2 for x, y in zip(xs, ys, strict=True)), ys)
    left, at = min((_jump_at(xs, ys, place).left, place) for place in places)
    if without == 0:
        return at, 1.0  # nothing is left to explain
    f = (without - left) / (left / degrees) if left > 0 else math.inf
    return at, min(1.0, len(places) * f_tail(max(f, 0.0), 1, degrees))


def coefficients(
    xs: Sequence[float], ys: Sequence[float], jump_at: float | None = None
) -> tuple[float, ...]:
    """Intercept and slope, and the height if there is to be a jump; without their intervals."""
    if jump_at is not None:
        return _jump_at(xs, ys, jump_at).values
    line = fit_line(xs, ys)
    return line.intercept, line.slope


@dataclass(frozen=True)
class _JumpFit:
    """Intercept, slope and height; their variances for a residual variance of 1; squares left."""

    values: tuple[float, float, float]
    units: tuple[float, float, float]
    left: float


def _jump_at(xs: Sequence[float], ys: Sequence[float], place: float) -> _JumpFit:
    """Least squares through ``1, x, [x >= place]``, by their normal equations.

    Draft lengths are small whole numbers, so nothing is lost by forming the equations.
    """
    design = [(1.0, float(x), 1.0 if x >= place else 0.0) for x in xs]
    moments = [[sum(row[i] * row[j] for row in design) for j in range(3)] for i in range(3)]
    shared = [sum(row[i] * y for row, y in zip(design, ys, strict=True)) for i in range(3)]
    inverse = _inverse(moments)
    values = [sum(a * b for a, b in zip(row, shared, strict=True)) for row in inverse]
    left = sum(
        (y - sum(v * c for v, c in zip(values, row, strict=True))) ** 2
        for row, y in zip(design, ys, strict=True)
    )
    return _JumpFit(
        (values[0], values[1], values[2]),
        (inverse[0][0], inverse[1][1], inverse[2][2]),
        _settled(left, ys),
    )


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Gauss-Jordan with pivots; the matrix is small and has an inverse."""
    n = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i in range(n):
        best = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[best] = rows[best], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for r in range(n):
            if r != i:
                factor = rows[r][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[n:] for row in rows]


def _settled(left: float, ys: Sequence[float]) -> float:
    """Squares that are only rounding count as none."""
    return 0.0 if left <= sum((ROUNDING * y) ** 2 for y in ys) else left


def _around(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half)


def _check(xs: Sequence[float], ys: Sequence[float]) -> None:
    if len(xs) != len(ys) or len(xs) < LEAST_POINTS or len(set(xs)) < 2:
        raise ValueError(
            f"a line with intervals through x {list(xs)}: it needs {LEAST_POINTS} points or more, "
            "not all at one x"
        )


def line_json(fit: FittedLine) -> dict[str, Any]:
    """Slope, intercept, R^2 and break, in the unit that was fitted (ms)."""
    jump = fit.jump
    return {
        "slope_ms": fit.slope.value,
        "slope_ms_interval": fit.slope.interval,
        "intercept_ms": fit.intercept.value,
        "intercept_ms_interval": fit.intercept.interval,
        "r_squared": fit.r_squared,
        "break": None
        if jump is None
        else {
            "gamma": int(jump.x),
            "jump_ms": jump.height.value,
            "jump_ms_interval": jump.height.interval,
        },
        "break_p_value": fit.p_value,
    }
