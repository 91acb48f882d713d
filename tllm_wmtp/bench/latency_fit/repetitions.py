"""Paired repetitions of one arm at one context: medians, the runtime's timers, resamples.

In a repetition every arm takes one step of every depth, so what disturbs the machine meets them
together, and a repetition is the unit that is resampled. Times of steps have far outliers on one
side, so each depth's time is the median over repetitions.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tllm_wmtp.bench.common import interval_of
from tllm_wmtp.bench.latency_fit.regression import Estimate

RESAMPLES = 1000
#: Repetitions, or pairs of them, by index; they may come several times.
Rounds = Sequence[int]


@dataclass(frozen=True)
class Timers:
    """``fwd_ms`` of each later draft forward, and ``ctx_ms`` that the first one costs more."""

    fwd_ms: float
    ctx_ms: float

    def draft_ms(self, gamma: int) -> float:
        """The draft phase of the model, ``t_ctx + gamma * t_fwd``."""
        return self.ctx_ms + gamma * self.fwd_ms


@dataclass
class Sweep:
    """``step_ms``, ``draft_ms``, ``verify_ms`` and ``extend_ms`` (the first draft forward): per
    depth one time per repetition."""

    arm: str
    context: int
    depths: tuple[int, ...]
    step_ms: dict[int, list[float]] = field(default_factory=dict)
    draft_ms: dict[int, list[float]] = field(default_factory=dict)
    verify_ms: dict[int, list[float]] = field(default_factory=dict)
    extend_ms: dict[int, list[float]] = field(default_factory=dict)

    def add(self, depth: int, draft_s: float, verify_s: float, extend_s: float) -> None:
        """The next repetition's step of ``depth``, in seconds."""
        for times, seconds in (
            (self.step_ms, draft_s + verify_s),
            (self.draft_ms, draft_s),
            (self.verify_ms, verify_s),
            (self.extend_ms, extend_s),
        ):
            times.setdefault(depth, []).append(seconds * 1e3)

    @property
    def gammas(self) -> tuple[int, ...]:
        return tuple(depth - 1 for depth in self.depths)

    @property
    def repetitions(self) -> int:
        return len(self.step_ms[self.depths[0]])

    @property
    def rounds(self) -> range:
        return range(self.repetitions)

    def forwards_ms(self, depth: int) -> list[float]:
        """Of each repetition's step, the mean of its later draft forwards; none at depth 2."""
        if depth == 2:
            return []
        pairs = zip(self.draft_ms[depth], self.extend_ms[depth], strict=True)
        return [(draft - extend) / (depth - 2) for draft, extend in pairs]

    def timers(self, rounds: Rounds) -> Timers:
        """Over all depths: of each repetition the median of its steps, of those the median.

        Raises:
            ValueError: no depth has a later draft forward.
        """
        fwd, extend = (statistics.median(some[r] for r in rounds) for some in self._by_repetition)
        return Timers(fwd, extend - fwd)

    @cached_property
    def _by_repetition(self) -> tuple[list[float], list[float]]:
        """A later draft forward and the first one: medians over the depths. For a whole sweep."""
        deep = [self.forwards_ms(depth) for depth in self.depths if depth > 2]
        if not deep:
            raise ValueError(f"depths {self.depths}: none has a second draft forward to time")
        first = [self.extend_ms[depth] for depth in self.depths]
        return (
            [statistics.median(steps) for steps in zip(*deep, strict=True)],
            [statistics.median(steps) for steps in zip(*first, strict=True)],
        )


def medians(times: dict[int, list[float]], rounds: Rounds) -> list[float]:
    """One per depth, over these repetitions, in ascending order of the depths."""
    return [statistics.median(times[depth][r] for r in rounds) for depth in sorted(times)]


def estimate(rounds: Rounds, of: Callable[[Rounds], float], seed: int = 0) -> Estimate:
    """``of(rounds)`` and its 95 % bootstrap interval over repetitions."""
    chance = random.Random(seed)
    draws = [of(chance.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES)]
    return Estimate(of(rounds), *interval_of(draws))
