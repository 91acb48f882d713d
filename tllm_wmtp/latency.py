"""What a step costs: the latency model, and running estimates of its parts.

``step = t_verify(depth) + t_ctx + draft_len * t_fwd`` (arXiv 2607.21535): a verify of ``depth``
rows reads the whole context once, each draft forward costs ``t_fwd``, and the first one feeds the
accepted rows, which costs ``t_ctx`` more. The verify may jump where a kernel changes its tiling,
so it is kept per depth; the draft phase is a line in ``draft_len``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Observations after which a depth counts as measured: the lower of two is not the one that paid
#: for a first call.
MEASURED = 2
#: Observations that one length counts for at most in the draft's line.
MOST_WEIGHT = 9
#: Variances, all of logarithms of times: of one measurement, of what a level and a shape change
#: from one step to the next, and of a shape or a level that nobody has seen.
NOISE, LEVEL_DRIFT, SHAPE_DRIFT, UNKNOWN = 1e-2, 1e-3, 1e-5, 1.0
#: A residual counts for at most so many standard deviations.
MOST_DEVIATIONS = 2.0
#: Seconds below this are a clock that stood still.
SHORTEST = 1e-9


@dataclass(frozen=True)
class Line:
    """``intercept + slope * x``; ``r_squared`` is 1 where the points have no spread."""

    intercept: float
    slope: float
    r_squared: float = 1.0

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit_line(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float] | None = None
) -> Line:
    """Weighted least squares; through the origin where all ``xs`` are the same.

    Raises:
        ValueError: no points.
    """
    if not xs:
        raise ValueError("a line through no points")
    weights = [1.0] * len(xs) if weights is None else weights
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    if spread == 0:
        return Line(0.0, mean_y / mean_x) if mean_x else Line(mean_y, 0.0)
    shared = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    line = Line(mean_y - shared / spread * mean_x, shared / spread)
    left = sum(w * (y - line.at(x)) ** 2 for w, x, y in zip(weights, xs, ys, strict=True))
    whole = sum(w * (y - mean_y) ** 2 for w, y in zip(weights, ys, strict=True))
    return Line(line.intercept, line.slope, 1 - left / whole if whole else 1.0)


class LevelledTimes:
    """Running times of steps of several sizes: ``level * shape[size]``.

    Every observation moves both, each by its share of the uncertainty (a Kalman filter in
    logarithms that leaves covariances out). The level's drift is the larger one, so a context that
    grows or a machine that slows down moves all sizes together, also those not tried since. Both
    are driven by one residual, so they cannot drift apart while their product stays.
    """

    def __init__(self, sizes: int):
        self._log_level, self._level_variance = 0.0, UNKNOWN
        self._log_shape = [0.0] * sizes
        self._shape_variance = [UNKNOWN] * sizes
        self._seen_at = [0] * sizes
        self._count = [0] * sizes
        self._step = 0

    def count(self, size: int) -> int:
        return self._count[size]

    def seconds(self, size: int) -> float:
        return math.exp(self._log_level + self._log_shape[size])

    def observe(self, size: int, seconds: float) -> None:
        observed = math.log(max(seconds, SHORTEST))
        if not any(self._count):
            self._log_level, self._level_variance = observed, 0.0
        self._step += 1
        self._level_variance = min(self._level_variance + LEVEL_DRIFT, UNKNOWN)
        drift = SHAPE_DRIFT * (self._step - self._seen_at[size])
        shape_variance = min(self._shape_variance[size] + drift, UNKNOWN)
        residual = observed - self._log_level - self._log_shape[size]
        if self._count[size] == 1 and residual < 0:
            # The first one is not believed against a faster second one.
            shape_variance = UNKNOWN
        total = self._level_variance + shape_variance + NOISE
        most = MOST_DEVIATIONS * math.sqrt(total)
        residual = min(max(residual, -most), most)
        level_gain, shape_gain = self._level_variance / total, shape_variance / total
        self._log_level += level_gain * residual
        self._level_variance *= 1 - level_gain
        self._log_shape[size] += shape_gain * residual
        self._shape_variance[size] = shape_variance * (1 - shape_gain)
        self._seen_at[size] = self._step
        self._count[size] += 1

    def transplanted(self) -> LevelledTimes:
        """The same shape for another kind of step, whose first observation sets the level."""
        other = copy.deepcopy(self)
        other._level_variance = UNKNOWN
        other._count = [min(count, MEASURED) for count in self._count]
        return other


class StepTimes:
    """Running estimate of a step's seconds, by depth, at one batch size and context length."""

    def __init__(self, max_depth: int):
        self._max_depth = max_depth
        self._draft = LevelledTimes(max_depth)  # by draft_len
        self._verify = LevelledTimes(max_depth)  # by draft_len too: depth - 1
        self._estimate: list[float] | None = None

    def observe(self, depth: int, draft_s: float, verify_s: float) -> None:
        if depth > 1:
            self._draft.observe(depth - 1, draft_s)
        self._verify.observe(depth - 1, verify_s)
        self._estimate = None

    def measured(self, depth: int) -> bool:
        return self._verify.count(depth - 1) >= MEASURED

    def transplanted(self) -> StepTimes:
        other = StepTimes(self._max_depth)
        other._draft, other._verify = self._draft.transplanted(), self._verify.transplanted()
        return other

    @property
    def seconds(self) -> list[float]:
        """Seconds of a step, entry ``depth - 1`` for depths 1 .. max_depth."""
        if self._estimate is None:
            pairs = zip(self.draft_seconds(), self.verify_seconds(), strict=True)
            self._estimate = [draft + verify for draft, verify in pairs]
        return self._estimate

    def draft_line(self) -> Line:
        """``t_ctx`` and ``t_fwd`` in seconds, neither below zero."""
        points = [
            (length, self._draft.seconds(length), min(self._draft.count(length), MOST_WEIGHT))
            for length in range(1, self._max_depth)
            if self._draft.count(length)
        ]
        if not points:
            return Line(0.0, 0.0)
        lengths, seconds, weights = zip(*points, strict=True)
        line = fit_line(lengths, seconds, weights)
        if line.intercept < 0:  # through the origin and the centre of the points
            centre = sum(w * x for x, _, w in points)
            line = Line(0.0, sum(w * y for _, y, w in points) / centre)
        elif line.slope < 0:
            line = Line(sum(w * y for _, y, w in points) / sum(weights), 0.0)
        return line

    def draft_seconds(self) -> list[float]:
        line = self.draft_line()
        return [0.0, *(line.at(length) for length in range(1, self._max_depth))]

    def verify_seconds(self) -> list[float]:
        """A depth that is not measured yet costs as much as the next smaller one that is.

        More rows never cost less, so that is the least it can cost: a depth is not left out for a
        cost that nobody has seen. Below the smallest measured one, that one's time.
        """
        counts = [self._verify.count(index) for index in range(self._max_depth)]
        known = [index for index, count in enumerate(counts) if count >= MEASURED]
        known = known or [index for index, count in enumerate(counts) if count] or [0]
        seconds, reference = [], known[0]
        for index in range(self._max_depth):
            if index in known:
                reference = index
            seconds.append(self._verify.seconds(reference))
        return seconds


class CostModel:
    """:class:`StepTimes` per context length and batch size, both in powers of two.

    A pair that was never seen starts from the nearest one: how times grow with the depth changes
    slowly with the context, how long they are is corrected by the first step.
    """

    def __init__(self, max_depth: int):
        self._max_depth = max_depth
        self._times: dict[tuple[int, int], StepTimes] = {}

    def observe(
        self, context_tokens: int, batch: int, depth: int, draft_s: float, verify_s: float
    ) -> None:
        """``draft_s`` and ``verify_s`` of one step of ``batch`` requests of ``context_tokens``."""
        key = self.bucket(context_tokens, batch)
        if key not in self._times:
            self._times[key] = self._nearest(key).transplanted()
        self._times[key].observe(depth, draft_s, verify_s)

    def at(self, context_tokens: int, batch: int) -> StepTimes:
        """The estimates for such a step, or the nearest ones."""
        key = self.bucket(context_tokens, batch)
        return self._times.get(key) or self._nearest(key)

    @staticmethod
    def bucket(context_tokens: int, batch: int) -> tuple[int, int]:
        return max(context_tokens, 1).bit_length(), max(batch, 1).bit_length()

    def _nearest(self, key: tuple[int, int]) -> StepTimes:
        if not self._times:
            return StepTimes(self._max_depth)
        return self._times[
            min(self._times, key=lambda k: (abs(k[0] - key[0]) + abs(k[1] - key[1]), k))
        ]
