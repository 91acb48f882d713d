"""What the steps of a request add up to, kept while they are recorded.

Whoever pools many requests looks at none of their steps again: sums are there already, and the
median of all steps is searched in lists that are in order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class StepTotals:
    """Sums over the steps of one request, in seconds and drafts; ``step_s_of[n]`` has the seconds
    of each step that drafted n tokens, in ascending order."""

    steps: int = 0
    drafted: int = 0
    draft_s: float = 0.0
    extend_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    step_s_of: dict[int, array[float]] = field(default_factory=dict)

    def add(
        self, drafted: int, draft_s: float, extend_s: float, verify_s: float, step_s: float
    ) -> None:
        self.steps += 1
        self.drafted += drafted
        self.draft_s += draft_s
        self.extend_s += extend_s
        self.verify_s += verify_s
        self.step_s += step_s
        insort(self.step_s_of.setdefault(drafted, array("d")), step_s)


def pooled_median_step(members: Iterable[StepTotals]) -> float:
    """Seconds of a step, as :func:`tllm_wmtp.metrics.median_step` has it for all steps of all
    members.

    Raises:
        ValueError: there are no steps.
    """
    columns: dict[int, list[Sequence[float]]] = {}
    for member in members:
        for drafted, seconds in member.step_s_of.items():
            columns.setdefault(drafted, []).append(seconds)
    counts = {drafted: sum(map(len, group)) for drafted, group in columns.items()}
    steps = sum(counts.values())
    if steps == 0:
        raise ValueError("a median of zero steps has no value")
    return sum(
        counts[drafted] / steps * median_of_ascending(group) for drafted, group in columns.items()
    )


def median_of_ascending(columns: Sequence[Sequence[float]]) -> float:
    """The median of all values of ``columns``, each of which is in ascending order."""
    count = sum(map(len, columns))
    middle = _value_at(columns, count // 2)
    return middle if count % 2 else (_value_at(columns, count // 2 - 1) + middle) / 2


def _value_at(columns: Sequence[Sequence[float]], rank: int) -> float:
    """The value that ``rank`` others precede in the order of all.

    Each round asks every column where a pivot stands in what is left of it. The pivot is the
    median of the columns' middles, weighted by what is left, so a quarter of that goes or more.
    """
    spans = [(column, 0, len(column)) for column in columns]
    while True:
        spans = [span for span in spans if span[1] < span[2]]
        pivot = _weighted_median([(c[(b + e) // 2], e - b) for c, b, e in spans])
        before = [bisect_left(c, pivot, b, e) for c, b, e in spans]
        through = [bisect_right(c, pivot, b, e) for c, b, e in spans]
        n_before = sum(at - b for at, (_, b, _) in zip(before, spans, strict=True))
        n_through = sum(at - b for at, (_, b, _) in zip(through, spans, strict=True))
        if n_before <= rank < n_through:
            return pivot
        if rank < n_before:
            spans = [(c, b, at) for at, (c, b, _) in zip(before, spans, strict=True)]
        else:
            spans = [(c, at, e) for at, (c, _, e) in zip(through, spans, strict=True)]
            rank -= n_through


def _weighted_median(values: list[tuple[float, int]]) -> float:
    values.sort()
    half, passed = sum(weight for _, weight in values) / 2, 0
    for value, weight in values:
        passed += weight
        if passed >= half:
            return value
    raise ValueError("a median of no values")
