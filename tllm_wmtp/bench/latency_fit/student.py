"""Tails and quantiles of Student's t and of F, through the incomplete beta function."""

from __future__ import annotations

import math
from functools import lru_cache

#: A step of the continued fraction that changes it by less ends it.
CONVERGED = 1e-15
MOST_STEPS = 10_000
TINY = 1e-300


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised ``I_x(a, b)`` for ``a, b > 0`` and x in [0, 1].

    By the continued fraction of Abramowitz and Stegun, 26.5.8, evaluated from its beginning
    (Lentz's method). It converges fast for x below (a + 1) / (a + b + 2); above, the symmetry
    ``I_x(a, b) = 1 - I_{1-x}(b, a)`` leads back.
    """
    if not 0 <= x <= 1 or a <= 0 or b <= 0:
        raise ValueError(f"I_x(a, b) of x {x}, a {a}, b {b}: x is from 0 to 1, a and b above 0")
    if x in (0.0, 1.0):
        return float(x)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return math.exp(log_front) / a * _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    numerator, denominator = 1.0, 1 - (a + b) * x / (a + 1)
    denominator = 1 / (denominator or TINY)
    value = denominator
    for m in range(1, MOST_STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / ((1 + term * denominator) or TINY)
            numerator = (1 + term / numerator) or TINY
            change = numerator * denominator
            value *= change
        if abs(change - 1) < CONVERGED:
            return value
    raise ArithmeticError(f"the incomplete beta function of {a}, {b}, {x} does not converge")


def t_tail(t: float, degrees: int) -> float:
    """Probability that Student's t of ``degrees`` of freedom exceeds ``t``."""
    tail = incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return tail if t >= 0 else 1 - tail


@lru_cache(maxsize=256)
def t_quantile(share: float, degrees: int) -> float:
    """The value that t of ``degrees`` of freedom stays below with probability ``share``.

    Raises:
        ValueError: no share between 0 and 1, or no degree of freedom.
    """
    if not 0 < share < 1 or degrees < 1:
        raise ValueError(f"a t quantile of share {share} and {degrees} degrees of freedom")
    if share < 0.5:
        return -t_quantile(1 - share, degrees)
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > 1 - share:
        low, high = high, 2 * high
    while True:  # halves until no number lies between
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        if t_tail(middle, degrees) > 1 - share:
            low = middle
        else:
            high = middle


def f_tail(f: float, above: int, below: int) -> float:
    """Probability that F of ``above`` and ``below`` degrees of freedom exceeds ``f``."""
    if f == math.inf:
        return 0.0
    return incomplete_beta(below / 2, above / 2, below / (below + above * f))
