"""Pearson's tests, for outputs that may only be told apart by how often they occur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import torch

#: Cells expected less often than this are counted as one.
LEAST_EXPECTED = 5.0


def survival(statistic: float, freedom: int) -> float:
    """P(a chi-square variable of ``freedom`` degrees exceeds ``statistic``)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit(counts: Mapping[Hashable, int], expected: Mapping[Hashable, float]) -> float:
    """p value of ``counts`` under the probabilities ``expected``; 0 if the impossible occurred."""
    if any(count and not expected.get(cell) for cell, count in counts.items()):
        return 0.0
    total = sum(counts.values())
    pairs, rest = [], [0.0, 0.0]
    for cell, probability in expected.items():
        if total * probability >= LEAST_EXPECTED:
            pairs.append((counts.get(cell, 0), total * probability))
        else:
            rest[0] += counts.get(cell, 0)
            rest[1] += total * probability
    if rest[1] >= LEAST_EXPECTED:
        pairs.append((int(rest[0]), rest[1]))
    assert len(pairs) > 1, "one cell can never differ"
    return survival(sum((n - e) ** 2 / e for n, e in pairs), len(pairs) - 1)


def homogeneity(first: Counter[Hashable], second: Counter[Hashable]) -> float:
    """p value of both counts coming from one distribution."""
    samples = (first, second)
    totals = [sum(sample.values()) for sample in samples]
    rows: list[list[float]] = []
    rest = [0.0, 0.0]
    for cell in first.keys() | second.keys():
        counts = [float(sample[cell]) for sample in samples]
        if sum(counts) * min(totals) / sum(totals) >= LEAST_EXPECTED:
            rows.append(counts)
        else:
            rest = [have + more for have, more in zip(rest, counts, strict=True)]
    if sum(rest) * min(totals) / sum(totals) >= LEAST_EXPECTED:
        rows.append(rest)
    assert len(rows) > 1, "one cell can never differ"
    kept = [sum(row[i] for row in rows) for i in range(2)]
    statistic = 0.0
    for row in rows:
        for i in range(2):
            expected = sum(row) * kept[i] / sum(kept)
            statistic += (row[i] - expected) ** 2 / expected
    return survival(statistic, len(rows) - 1)
