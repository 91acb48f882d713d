"""What several benchmarks share: the name of a configuration, and an interval of a ratio."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

RESAMPLES = 2000


def config_hash(config: Any) -> str:
    """Twelve hex digits that name a whole configuration, a dataclass."""
    content = json.dumps(asdict(config), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def ratio_of_sums(
    above: Sequence[float], below: Sequence[float], seed: int = 0
) -> tuple[float, list[float]]:
    """``sum(above) / sum(below)`` of paired measurements, and its 95 % bootstrap interval."""
    return sum(above) / sum(below), interval_of(ratio_draws(above, below, seed))


def ratio_draws(above: Sequence[float], below: Sequence[float], seed: int = 0) -> list[float]:
    """That ratio in :data:`RESAMPLES` resamples of the pairs, in the order drawn."""
    pairs = list(zip(above, below, strict=True))

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        return sum(a for a, _ in chosen) / sum(b for _, b in chosen)

    chance = random.Random(seed)
    return [ratio(chance.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]


def interval_of(draws: Sequence[float]) -> list[float]:
    """The 95 % interval of bootstrap draws: what is between their 2.5th and 97.5th percentile."""
    ordered = sorted(draws)
    return [ordered[int(len(ordered) * 0.025)], ordered[int(len(ordered) * 0.975) - 1]]


def median_draws(values: Sequence[float], seed: int = 0) -> list[float]:
    """Medians of :data:`RESAMPLES` resamples of ``values``, in the order drawn.

    The k-th smallest of n draws from n sorted values is the value at ``floor(n * U)`` with ``U``
    the k-th smallest of n uniform numbers, which has a Beta(k, n - k + 1) distribution; so each
    median takes one random number (two if n is even) instead of n.
    """
    ordered, count = sorted(values), len(values)
    chance = random.Random(seed)
    draws = []
    for _ in range(RESAMPLES):
        rank = (count + 1) // 2
        low = chance.betavariate(rank, count - rank + 1)
        high = low
        if count % 2 == 0:  # given the k-th, the next is the smallest of those above it
            high = low + (1 - low) * chance.betavariate(1, count - rank)
        at = [min(int(count * place), count - 1) for place in (low, high)]
        draws.append((ordered[at[0]] + ordered[at[1]]) / 2)
    return draws
