"""Statistics of a cell, against numbers worked out by hand and against plain simulation."""

from __future__ import annotations

import random
import statistics

import pytest

from tllm_wmtp.bench.common import interval_of, median_draws, ratio_draws
from tllm_wmtp.bench.sweep.protocol import (
    Answer,
    Iteration,
    acceptance,
    is_degenerate,
    plateau,
    select,
    timing,
)


def answer(histogram: tuple[int, ...], **changes: object) -> Answer:
    """One that made as many tokens as its steps say, and one by its prefill."""
    steps = sum(histogram)
    tokens = sum(count * (drafts + 1) for drafts, count in enumerate(histogram))
    options = {"histogram": histogram} | changes
    return Answer(100, tokens + 1, steps, tokens, **options)  # type: ignore[arg-type]


def steps(seconds: list[float], requests: int = 1, tokens: int = 1) -> list[Iteration]:
    return [Iteration(each, requests, tokens * requests) for each in seconds]


# Acceptance.


def test_alpha_and_al_pool_the_requests() -> None:
    found = acceptance([answer((2, 1, 1)), answer((0, 2, 4))])
    assert found.histogram == [2, 3, 5]
    # Of 10 steps 8 accepted one draft, 5 of these a second: AL = 1 + 0.8 + 0.8 * 0.625.
    assert found.alpha is not None
    assert [(each.successes, each.trials) for each in found.alpha] == [(8, 10), (5, 8)]
    assert found.al == pytest.approx(2.3)
    # Wilson's interval of 8 of 10, from the literature.
    assert found.alpha[0].interval == pytest.approx((0.49016, 0.94332), abs=1e-4)


def test_a_position_that_no_step_reached_has_no_trials() -> None:
    found = acceptance([answer((5, 0, 0, 0))])
    assert found.alpha is not None
    assert [(each.successes, each.trials) for each in found.alpha] == [(0, 5), (0, 0), (0, 0)]
    assert found.alpha[1].interval == (0.0, 1.0)
    assert found.al == 1.0


def test_the_interval_of_al_is_over_requests() -> None:
    assert acceptance([answer((2, 3, 5))]).al_interval is None
    same = acceptance([answer((2, 3, 5))] * 4).al_interval
    assert same == pytest.approx([2.3, 2.3])  # requests that agree
    apart = acceptance([answer((10, 0, 0)), answer((0, 0, 10))]).al_interval
    assert apart == [1.0, 3.0]  # of two requests, a resample may have one twice


def test_without_a_step_nothing_is_claimed() -> None:
    found = acceptance([Answer(10, 1, 0, 0, histogram=(0, 0))])
    assert (found.al, found.al_interval, found.histogram, found.alpha) == (None, None, None, None)


def test_a_target_without_a_histogram_still_has_an_al() -> None:
    found = acceptance([Answer(10, 9, 2, 8), answer((0, 0, 1))])
    assert found.al == pytest.approx((8 + 3) / 3)
    assert found.histogram is None
    assert found.alpha is None


# Time.


@pytest.mark.parametrize(("tokens", "snapped"), [([4, 4, 3, 7], 4), ([1, 5, 5, 7], 5)])
def test_tpot_is_not_biased_where_al_snaps(tokens: list[int], snapped: int) -> None:
    """Steps of 10 ms that make 4.5 tokens on average: TPOT is 10 / 4.5 ms. A median of the
    throughput takes the middle step's integer for AL, and is wrong by 4.5 / 4 or 4.5 / 5."""
    iterations = [Iteration(0.010, 1, each) for each in tokens]
    answers = [answer(tuple(tokens.count(each) for each in range(1, 8)))]
    al = acceptance(answers).al
    assert al == pytest.approx(4.5)
    found = timing(select(iterations), answers, al)
    assert found.tpot_s == pytest.approx(0.010 / 4.5)
    biased = 1 / statistics.median(each.tokens / each.seconds for each in iterations)
    assert biased / found.tpot_s == pytest.approx(4.5 / snapped)


def test_tpot_of_a_batch_is_what_each_request_waits_for() -> None:
    """4 requests, 20 ms a step, 3 tokens each: a request waits 20 / 3 ms per token, and the batch
    makes 600 tokens per second."""
    iterations = steps([0.020] * 5, requests=4, tokens=3)
    answers = [answer((0, 0, 5))] * 4
    selection = select(iterations)
    found = timing(selection, answers, 3.0)
    assert selection.effective_batch == 4
    assert found.t_iter_s == pytest.approx(0.005)  # AL / X = 3 / 600
    assert found.tpot_s == pytest.approx(0.020 / 3)
    assert found.tpot_interval == pytest.approx([0.020 / 3] * 2)


def test_one_request_has_no_interval_of_tpot() -> None:
    found = timing(select(steps([0.01, 0.02])), [answer((0, 2))], 2.0)
    assert found.tpot_s == pytest.approx(0.0075)
    assert found.tpot_interval is None
    assert found.t_iter_interval == [0.01, 0.02]


def test_nothing_measured_has_no_time() -> None:
    found = timing(select([]), [], None)
    assert (found.t_iter_s, found.tpot_s) == (None, None)
    lone = timing(select(steps([0.01])), [answer((1,))], 1.0)
    assert (lone.t_iter_s, lone.t_iter_interval) == (0.01, None)


# What is left out.


def test_the_ramp_of_a_batch_does_not_count() -> None:
    iterations = [
        *steps([0.001], requests=1),
        *steps([0.002], requests=2),
        *steps([0.010, 0.011, 0.012, 0.013], requests=3),
        *steps([0.003], requests=2),
        *steps([0.001], requests=1),
    ]
    selection = select(iterations)
    assert (selection.ramp, selection.clipped, selection.effective_batch) == (4, 0, 3)
    assert [each.seconds for each in selection.kept] == [0.010, 0.011, 0.012, 0.013]


def test_the_plateau_is_what_most_iterations_had() -> None:
    assert plateau([1, 2, 2, 3, 3]) == 3  # as often: the larger
    assert plateau([8, 1, 1, 1]) == 1
    assert plateau([4]) == 4


def test_the_band_clips_from_half_to_twice_the_median() -> None:
    selection = select(steps([10.0, 4.9, 5.0, 20.0, 20.1, 10.0, 10.0]))
    assert [each.seconds for each in selection.kept] == [10.0, 5.0, 20.0, 10.0, 10.0]
    assert (selection.ramp, selection.clipped) == (0, 2)


def test_pieces_that_arrive_at_once_are_clipped() -> None:
    selection = select(steps([0.0, 10.0, 10.0, 10.0]))
    assert (len(selection.kept), selection.clipped) == (3, 1)


@pytest.mark.parametrize("period", [1, 2, 7, 16])
def test_a_short_cycle_at_the_end_is_degenerate(period: int) -> None:
    cycle = list(range(100, 100 + period))
    needed = max(4 * period, 32)
    whole = (cycle * needed)[-needed:]
    assert is_degenerate([1, 2, 3, *whole])
    assert not is_degenerate([1, 2, 3, *whole[1:]])
    assert not is_degenerate([*whole, 999])  # it has come out of it


def test_what_repeats_in_longer_cycles_is_not_degenerate() -> None:
    line = list(range(17))
    assert not is_degenerate(line * 30)  # as logs do
    assert not is_degenerate([])
    assert not is_degenerate([5] * 31)


# Bootstrap.


@pytest.mark.parametrize("count", [7, 8])
def test_drawn_medians_are_those_of_resamples(count: int) -> None:
    """Against the plain way: draw all values, sort, take the middle."""
    chance = random.Random(3)
    values = [chance.gauss(10, 2) for _ in range(count)]
    plain = sorted(statistics.median(chance.choices(values, k=count)) for _ in range(20_000))
    drawn = sorted(median_draws(values, seed=1))
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        expected = plain[int(share * len(plain))]
        below = sum(each <= expected for each in drawn) / len(drawn)
        strictly = sum(each < expected - 1e-12 for each in drawn) / len(drawn)
        assert strictly - 0.04 < share < below + 0.04


def test_draws_are_the_same_each_time() -> None:
    assert median_draws([1.0, 2.0, 3.0]) == median_draws([1.0, 2.0, 3.0])
    assert ratio_draws([1, 2], [3, 4]) == ratio_draws([1, 2], [3, 4])


def test_an_interval_is_between_the_outer_percentiles() -> None:
    assert interval_of(list(range(1000, 0, -1))) == [26, 975]
