"""Lines with intervals and jumps, against hand work, closed forms, numpy and many seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy
import pytest

from tllm_wmtp.bench.latency_fit.regression import (
    SIGNIFICANT,
    Estimate,
    coefficients,
    find_jump,
    fit_straight,
    fit_with_jump,
    line_json,
)
from tllm_wmtp.bench.latency_fit.student import f_tail, incomplete_beta, t_quantile, t_tail

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
SEEDS = 600


@pytest.mark.parametrize("x", [0.0, 1e-9, 0.1, 0.5, 0.77, 0.999, 1.0])
def test_incomplete_beta_of_closed_forms(x: float) -> None:
    for b in (0.5, 1.0, 3.0, 40.0):
        assert incomplete_beta(1.0, b, x) == pytest.approx(1 - (1 - x) ** b, rel=1e-12)
        assert incomplete_beta(b, 1.0, x) == pytest.approx(x**b, rel=1e-12)
    assert incomplete_beta(2.0, 2.0, x) == pytest.approx(3 * x**2 - 2 * x**3, rel=1e-12)
    angle = 2 / math.pi * math.asin(math.sqrt(x))
    assert incomplete_beta(0.5, 0.5, x) == pytest.approx(angle, rel=1e-12)


@pytest.mark.parametrize(("a", "b", "x"), [(0.0, 1.0, 0.5), (1.0, -1.0, 0.5), (1.0, 1.0, 1.1)])
def test_incomplete_beta_has_limits(a: float, b: float, x: float) -> None:
    with pytest.raises(ValueError, match="x is from 0 to 1"):
        incomplete_beta(a, b, x)


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (6, 2.447), (10, 2.228), (30, 2.042)],
)
def test_t_quantiles_of_the_printed_table(degrees: int, value: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(value, abs=6e-4)
    assert t_quantile(0.025, degrees) == pytest.approx(-value, abs=6e-4)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.6, 0.975, 0.9999])
def test_t_quantiles_of_one_and_two_degrees_have_a_closed_form(share: float) -> None:
    cauchy = math.tan(math.pi * (share - 0.5))
    assert t_quantile(share, 1) == pytest.approx(cauchy, rel=1e-9, abs=1e-12)
    two = (2 * share - 1) / math.sqrt(2 * share * (1 - share))
    assert t_quantile(share, 2) == pytest.approx(two, rel=1e-9, abs=1e-12)


def test_t_becomes_normal_and_its_tail_is_symmetric() -> None:
    assert t_quantile(0.975, 10**6) == pytest.approx(1.959964, abs=1e-5)
    assert t_tail(-1.3, 7) == pytest.approx(1 - t_tail(1.3, 7))
    for share, degrees in ((0.0, 3), (1.0, 3), (0.5, 0)):
        with pytest.raises(ValueError, match="t quantile"):
            t_quantile(share, degrees)


def test_f_tails() -> None:
    for f in (0.2, 1.0, 6.6, 90.0):
        assert f_tail(f, 1, 5) == pytest.approx(2 * t_tail(math.sqrt(f), 5))
        assert f_tail(f, 2, 8) == pytest.approx((1 + 2 * f / 8) ** -4)
    assert f_tail(math.inf, 1, 5) == 0.0


# Lines


def test_a_line_with_intervals_by_hand() -> None:
    # Squares of x - 1.5: 5; slope 8 / 5; residuals -0.1, 0.3, -0.3, 0.1, so 0.2 left of 13 and a
    # variance of 0.1; t of two degrees 4.30265.
    fit = fit_straight([0, 1, 2, 3], [1.0, 3.0, 4.0, 6.0])
    assert fit.slope.value == pytest.approx(1.6)
    assert fit.intercept.value == pytest.approx(1.1)
    assert fit.r_squared == pytest.approx(1 - 0.2 / 13)
    assert fit.slope.high - 1.6 == pytest.approx(4.30265 * math.sqrt(0.1 / 5), rel=1e-5)
    half = 4.30265 * math.sqrt(0.1 * (1 / 4 + 1.5**2 / 5))
    assert fit.intercept.interval == pytest.approx([1.1 - half, 1.1 + half], abs=1e-5)


def test_points_on_a_line_leave_no_doubt() -> None:
    fit = fit_with_jump(GAMMAS, [5 + 0.7 * gamma for gamma in GAMMAS])
    assert fit.slope.interval == pytest.approx([0.7, 0.7])
    assert fit.jump is None
    assert fit.p_value == 1.0
    assert fit.r_squared == pytest.approx(1.0)


@pytest.mark.parametrize(("xs", "ys"), [([1, 2], [1.0, 2.0]), ([2, 2, 2], [1.0, 2.0, 3.0])])
def test_an_interval_needs_three_points(xs: list[int], ys: list[float]) -> None:
    with pytest.raises(ValueError, match="3 points"):
        fit_straight(xs, ys)


def noisy(seed: int, sigma: float, jump: float = 0.0, at: int = 99, n: int = 8) -> list[float]:
    """``5 + 0.8 gamma`` and the jump, with normal noise."""
    chance = random.Random(seed)
    return [
        5 + 0.8 * gamma + (jump if gamma >= at else 0.0) + chance.gauss(0, sigma)
        for gamma in range(1, n + 1)
    ]


def test_the_intervals_cover_the_truth_as_often_as_they_say() -> None:
    fits = [fit_straight(GAMMAS, noisy(seed, 0.2)) for seed in range(SEEDS)]
    slopes = sum(fit.slope.low <= 0.8 <= fit.slope.high for fit in fits) / SEEDS
    intercepts = sum(fit.intercept.low <= 5 <= fit.intercept.high for fit in fits) / SEEDS
    assert 0.93 < slopes < 0.97
    assert 0.93 < intercepts < 0.97


# Jumps


def test_the_papers_verify_step_is_found_where_it_is() -> None:
    # 593 us per verify below depth 5, 1133 us from there on, and a slope of 0.71 ms.
    steps = [0.71 * gamma + (1.133 if gamma + 1 >= 5 else 0.593) for gamma in GAMMAS]
    fit = fit_with_jump(GAMMAS, steps)
    assert fit.jump is not None
    assert fit.jump.x + 1 == 5
    assert fit.jump.height.value == pytest.approx(0.540)
    assert fit.slope.value == pytest.approx(0.71)
    assert fit.intercept.value == pytest.approx(0.593)
    assert [fit.at(gamma) for gamma in GAMMAS] == pytest.approx(steps)
    shown = line_json(fit)
    assert shown["break"]["gamma"] == 4
    assert shown["break"]["jump_ms"] == pytest.approx(0.540)
    # One line through all of it would be wrong by much: what the jump adds goes into the slope.
    assert fit_straight(GAMMAS, steps).slope.value > 0.78


def test_a_jump_under_noise_is_found_and_covered() -> None:
    fits = [fit_with_jump(GAMMAS, noisy(seed, 0.05, jump=0.54, at=4)) for seed in range(150)]
    found = [fit.jump for fit in fits if fit.jump is not None]
    right = [jump for jump in found if jump.x == 4]
    assert len(found) > 0.95 * len(fits)
    assert len(right) > 0.95 * len(found)
    covered = sum(jump.height.low <= 0.54 <= jump.height.high for jump in right)
    assert covered > 0.9 * len(right)


@pytest.mark.parametrize("n", [5, 8, 12])
def test_noise_alone_has_a_jump_in_at_most_five_of_a_hundred(n: int) -> None:
    xs = range(1, n + 1)
    found = [find_jump(xs, noisy(seed, 0.1, n=n)) for seed in range(SEEDS)]
    false = sum(each is not None and each[1] <= SIGNIFICANT for each in found)
    margin = 3 * math.sqrt(0.05 * 0.95 / SEEDS)
    assert 0.01 < false / SEEDS < 0.05 + margin


def test_a_curve_is_no_jump() -> None:
    chance = random.Random(1)
    bent = [5 + 0.8 * x + 0.02 * x * x + chance.gauss(0, 0.001) for x in GAMMAS]
    assert fit_with_jump(GAMMAS, bent).jump is None


@pytest.mark.parametrize("at", [2, 8])
def test_a_jump_has_two_points_on_each_side(at: int) -> None:
    found = find_jump(GAMMAS, noisy(3, 0.0, jump=2.0, at=at))
    assert found is not None
    assert found[0] in range(3, 8)


def test_too_few_points_have_no_place_for_a_jump() -> None:
    fit = fit_with_jump([1, 2, 3, 4], [1.0, 2.0, 8.0, 9.0])
    assert fit.jump is None
    assert fit.p_value is None
    assert find_jump([1, 1, 1, 2, 2], [1.0, 1.1, 0.9, 2.0, 2.1]) is None


def numpy_fit(xs: Sequence[int], ys: Sequence[float], at: int) -> tuple[list[float], list[float]]:
    """Coefficients and standard errors, by a decomposition instead of normal equations."""
    design = numpy.array([[1.0, x, float(x >= at)] for x in xs])
    values, left, _, _ = numpy.linalg.lstsq(design, numpy.array(ys), rcond=None)
    inverse = numpy.linalg.pinv(design) @ numpy.linalg.pinv(design).T
    return values.tolist(), numpy.sqrt(numpy.diag(inverse) * left[0] / (len(xs) - 3)).tolist()


def test_a_jump_fit_is_that_of_numpy() -> None:
    ys = noisy(11, 0.05, jump=0.6, at=5)
    fit = fit_with_jump(GAMMAS, ys)
    values, errors = numpy_fit(GAMMAS, ys, 5)
    assert fit.jump is not None
    assert fit.jump.x == 5
    parts = (fit.intercept, fit.slope, fit.jump.height)
    assert [part.value for part in parts] == pytest.approx(values)
    halves = [part.high - part.value for part in parts]
    assert halves == pytest.approx([t_quantile(0.975, 5) * error for error in errors])
    assert coefficients(GAMMAS, ys, 5) == pytest.approx(tuple(values))
    assert coefficients(GAMMAS, ys) == pytest.approx(tuple(numpy.polyfit(GAMMAS, ys, 1)[::-1]))


def test_intervals_overlap_or_not() -> None:
    one = Estimate(1.0, 0.5, 1.5)
    assert one.overlaps(Estimate(2.0, 1.5, 2.5))
    assert Estimate(2.0, 1.5, 2.5).overlaps(one)
    assert not one.overlaps(Estimate(2.0, 1.6, 2.5))
