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
    median_step,
    summarise,
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


# Steps of varying depth.


def varying() -> RequestMetrics:
    """Six steps of at most three drafts: (drafted, accepted)."""
    metrics = RequestMetrics("windowed", 5, [0] * 4)
    for drafted, accepted, seconds in (
        (3, 3, 0.010),
        (1, 1, 0.004),
        (1, 0, 0.004),
        (0, 0, 0.002),
        (3, 1, 0.012),
        (2, 2, 0.008),
    ):
        metrics.record_step(accepted, 0.0, seconds, seconds, drafted)
    return metrics


def test_only_steps_that_drafted_so_far_are_trials() -> None:
    metrics = varying()
    assert metrics.accepted_histogram == [2, 2, 1, 1]
    assert metrics.drafted == [3, 1, 1, 0, 3, 2]
    assert metrics.accepted == [3, 1, 0, 0, 1, 2]
    # Position 1: five steps drafted one. Position 2: of the four that accepted one, the step that
    # drafted only one is no trial. Position 3: one of the two with two accepted drafted a third.
    assert [(a.successes, a.trials) for a in metrics.alpha] == [(4, 5), (2, 3), (1, 1)]
    assert metrics.alpha[0].interval == wilson_interval(4, 5)
    assert metrics.acceptance_length == pytest.approx((6 + 7) / 6)  # 7 accepted in 6 steps


def test_a_step_time_of_several_depths_is_no_single_median() -> None:
    # Medians by drafts: 0: 2 ms (1 step), 1: 4 ms (2), 2: 8 ms (1), 3: 11 ms (2).
    mean = (2 + 2 * 4 + 8 + 2 * 11) / 6 * 1e-3
    metrics = varying()
    assert median_step(metrics.step_s, metrics.drafted) == pytest.approx(mean)
    assert metrics.tpot_s == pytest.approx(mean / (13 / 6))


def test_an_outlier_moves_neither_one_depth_nor_several() -> None:
    assert median_step([1.0, 1.0, 90.0], [6, 6, 6]) == 1.0
    assert median_step([1.0, 1.0, 90.0, 3.0, 3.0, 80.0], [6, 6, 6, 1, 1, 1]) == pytest.approx(2.0)


def test_positions_nobody_tried_have_no_value_and_a_full_interval() -> None:
    metrics = RequestMetrics("windowed", 5, [0] * 4)
    metrics.record_step(1, 0.001, 0.003, 0.004, drafted=1)
    assert [a.trials for a in metrics.alpha] == [1, 0, 0]
    assert metrics.alpha[2].interval == (0.0, 1.0)
    with pytest.raises(ValueError, match="zero trials"):
        _ = metrics.alpha[2].value


def test_acceptance_lengths_may_be_half_integers() -> None:
    metrics = RequestMetrics("windowed", 5, [0] * 3)
    for accepted in (1, 2):
        metrics.record_step(accepted, 0.001, 0.002, 0.003)
    assert metrics.acceptance_length == 2.5
    assert metrics.tpot_s == pytest.approx(0.0012)


def test_fixed_depth_trials_are_those_of_the_histogram() -> None:
    chance = random.Random(3)
    metrics = RequestMetrics("native", 5, [0] * 5)
    for _ in range(100):
        metrics.record_step(chance.randrange(5), 0.0, 0.0, 0.0)
    assert metrics.alpha == conditional_acceptance(metrics.accepted_histogram)


@pytest.mark.parametrize(("accepted", "drafted"), [(2, 1), (0, 4), (4, 4), (-1, 3), (0, -1)])
def test_an_impossible_step_is_refused(accepted: int, drafted: int) -> None:
    metrics = RequestMetrics("windowed", 5, [0] * 4)
    with pytest.raises(ValueError, match="drafts"):
        metrics.record_step(accepted, 0.0, 0.0, 0.0, drafted)
    assert metrics.steps == 0


# Many requests.


def test_requests_are_pooled_by_steps() -> None:
    first = RequestMetrics("windowed", 100, [0] * 4, output_tokens=9, ttft_s=0.5, prefill_s=0.4)
    for accepted in (3, 3):
        first.record_step(accepted, 0.004, 0.006, 0.010)
    second = RequestMetrics("windowed", 50, [0] * 4, output_tokens=3, ttft_s=0.1, prefill_s=0.1)
    second.record_step(0, 0.0, 0.005, 0.005, drafted=0)
    second.record_step(0, 0.002, 0.006, 0.008, drafted=1)
    second.preemptions, second.prefix_hit_tokens = 1, 48
    third = RequestMetrics("windowed", 7, [0] * 4, ttft_s=0.3)
    whole = summarise([first, second, third])
    assert (whole.requests, whole.prompt_tokens, whole.output_tokens) == (3, 157, 12)
    assert (whole.steps, whole.drafted_tokens) == (4, 7)
    assert whole.accepted_histogram == [2, 0, 0, 2]
    assert [(a.successes, a.trials) for a in whole.alpha] == [(2, 3), (2, 2), (2, 2)]
    assert whole.acceptance_length == 2.5
    assert whole.draft_s == pytest.approx(0.010)
    assert whole.verify_s == pytest.approx(0.023)
    assert whole.step_s == pytest.approx(0.033)
    assert whole.prefill_s == pytest.approx(0.5)
    assert whole.tpot_s == pytest.approx((0.005 + 0.008 + 2 * 0.010) / 4 / 2.5)
    assert whole.ttft_s == 0.3
    assert (whole.preemptions, whole.prefix_hit_tokens) == (1, 48)


def test_requests_of_several_depths_are_pooled_by_position() -> None:
    shallow = RequestMetrics("windowed", 1, [0] * 2)
    shallow.record_step(1, 0.0, 0.0, 0.001)
    deep = RequestMetrics("windowed", 1, [0] * 4)
    deep.record_step(2, 0.0, 0.0, 0.001)
    whole = summarise([shallow, deep])
    assert whole.accepted_histogram == [0, 1, 1, 0]
    assert [(a.successes, a.trials) for a in whole.alpha] == [(2, 2), (1, 1), (0, 1)]


def test_nothing_served_yet_is_no_number() -> None:
    for nothing in (summarise([]), summarise([RequestMetrics("dense", 5, [0])])):
        assert nothing.steps == 0
        assert nothing.acceptance_length is None
        assert nothing.tpot_s is None
        assert nothing.ttft_s is None
        assert nothing.alpha == []
