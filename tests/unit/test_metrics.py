"""Statistics against worked examples and against simulated steps."""

from __future__ import annotations

import random
import statistics

import pytest

from tllm_wmtp.metrics import (
    Proportion,
    RequestMetrics,
    acceptance_length,
    conditional_acceptance,
    time_per_output_token,
    wilson_interval,
)


def test_conditional_rates_by_hand() -> None:
    rates = conditional_acceptance([2, 3, 5])  # of 10 steps 8 accepted one, 5 of these a second
    assert [(r.successes, r.trials) for r in rates] == [(8, 10), (5, 8)]
    assert [r.value for r in rates] == [0.8, 0.625]


def test_acceptance_length_is_the_mean_number_of_tokens_per_step() -> None:
    chance = random.Random(1)
    for depth in (2, 5, 8):
        steps = [chance.randrange(depth) for _ in range(200)]
        histogram = [steps.count(n) for n in range(depth)]
        assert acceptance_length(histogram) == pytest.approx(1 + statistics.fmean(steps))


def test_acceptance_length_of_extremes() -> None:
    assert acceptance_length([9, 0, 0]) == 1.0
    assert acceptance_length([0, 0, 9]) == 3.0
    assert acceptance_length([4]) == 1.0  # dense


def test_nothing_measured_is_an_error_not_a_number() -> None:
    with pytest.raises(ValueError, match="zero steps"):
        acceptance_length([0, 0])
    with pytest.raises(ValueError, match="zero trials"):
        _ = Proportion(0, 0).value
    metrics = RequestMetrics("dense", 5, [0])
    assert metrics.acceptance_length is None
    assert metrics.tpot_s is None


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(8, 10, 0.49016, 0.94332), (0, 10, 0.0, 0.27753), (50, 100, 0.40383, 0.59617)],
)
def test_wilson_intervals_of_the_literature(
    successes: int, trials: int, low: float, high: float
) -> None:
    interval = wilson_interval(successes, trials)
    assert interval == pytest.approx((low, high), abs=1e-4)
    assert Proportion(successes, trials).interval == interval


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    chance, covered, trials = random.Random(7), 0, 2000
    for _ in range(trials):
        low, high = wilson_interval(sum(chance.random() < 0.3 for _ in range(40)), 40)
        covered += low <= 0.3 <= high
    assert 0.93 < covered / trials < 0.97
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_time_per_token_is_not_the_median_of_snapping_throughputs() -> None:
    seconds, lengths = [0.010, 0.010, 0.010, 0.050], [1, 7, 1, 7]
    assert time_per_output_token(seconds, lengths) == pytest.approx(0.010 / 4)
    assert time_per_output_token(seconds, lengths, effective_batch=2) == pytest.approx(0.020 / 4)


def test_request_metrics_add_up() -> None:
    metrics = RequestMetrics("windowed", 5, [0] * 4)
    for accepted in (0, 3, 3):
        metrics.record_step(accepted, draft_s=0.001, verify_s=0.003, step_s=0.004)
    assert metrics.accepted_histogram == [1, 0, 0, 2]
    assert metrics.steps == 3
    assert metrics.acceptance_length == pytest.approx(3.0)
    assert metrics.tpot_s == pytest.approx(0.004 / 3)
