"""Pooled medians against those of the whole list, and what it costs to find them."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from tllm_wmtp import step_totals
from tllm_wmtp.metrics import RequestMetrics, median_step, summarise
from tllm_wmtp.step_totals import StepTotals, median_of_ascending, pooled_median_step


@pytest.mark.parametrize("values", [3, 50, 10**9])
def test_the_median_over_columns_is_that_of_all_values(values: int) -> None:
    chance = random.Random(values)
    for _ in range(300):
        columns = [
            sorted(float(chance.randrange(values)) for _ in range(chance.choice((0, 1, 2, 7, 40))))
            for _ in range(chance.randrange(1, 9))
        ]
        together = [value for column in columns for value in column]
        if together:
            assert median_of_ascending(columns) == statistics.median(together)


def test_medians_are_taken_per_number_of_drafts() -> None:
    first, second = StepTotals(), StepTotals()
    for drafted, seconds in ((6, 0.030), (6, 0.010), (2, 0.004)):
        first.add(drafted, 0.0, 0.0, seconds, seconds)
    second.add(6, 0.0, 0.0, 0.020, 0.020)
    assert pooled_median_step([first, second]) == pytest.approx((3 * 0.020 + 0.004) / 4)
    with pytest.raises(ValueError, match="zero steps"):
        pooled_median_step([StepTotals()])


class Unread(list[Any]):
    """Steps that may be added and counted, and not looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("a step was read again")

    __getitem__ = __iter__  # type: ignore[assignment]


def served(requests: int, steps: int) -> list[RequestMetrics]:
    """Requests with steps of random lengths and depths, all lists of steps unreadable."""
    chance = random.Random(steps)
    members = []
    for _ in range(requests):
        metrics = RequestMetrics("windowed", 10, [0] * 7, output_tokens=steps, ttft_s=0.1)
        for name in ("draft_s", "extend_s", "verify_s", "step_s", "drafted", "accepted"):
            setattr(metrics, name, Unread())
        for _ in range(steps):
            drafted = chance.choice((2, 6))
            draft_s = chance.random()
            metrics.record_step(0, draft_s, 0.01, draft_s + 0.01, drafted, draft_s / 2)
        members.append(metrics)
    return members


def test_pooling_reads_no_step_again_and_hardly_costs_more_with_ten_times_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = 0
    search = step_totals.bisect_left

    def counted(*given: Any) -> int:
        nonlocal searches
        searches += 1
        return search(*given)

    monkeypatch.setattr(step_totals, "bisect_left", counted)
    needed = []
    for steps in (50, 500):
        searches = 0
        whole = summarise(served(64, steps))
        assert whole.steps == 64 * steps
        needed.append(searches)
    assert needed[1] < 2 * needed[0]
    assert needed[1] < 64 * 500, "fewer than steps"


def test_pooled_sums_are_those_of_the_steps() -> None:
    chance = random.Random(9)
    members = [RequestMetrics("windowed", 10, [0] * 7) for _ in range(5)]
    for metrics in members:
        for _ in range(chance.randrange(40)):
            drafted = chance.randrange(7)
            metrics.record_step(0, *(chance.random() for _ in range(3)), drafted, chance.random())
    whole = summarise(members)
    for name in ("draft_s", "extend_s", "verify_s", "step_s"):
        together = [second for m in members for second in getattr(m, name)]
        assert getattr(whole, name) == pytest.approx(sum(together))
    step_s = [second for m in members for second in m.step_s]
    drafted = [count for m in members for count in m.drafted]
    assert whole.drafted_tokens == sum(drafted)
    pooled = pooled_median_step([m.totals for m in members])
    assert pooled == pytest.approx(median_step(step_s, drafted))
