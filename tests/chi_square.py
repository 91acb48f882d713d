"""Pearson's tests, for outputs that may only be told apart by how often they occur."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

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


def calibration(drawn: Sequence[int], expected: torch.Tensor) -> float:
    """p value of draws that each had a distribution of its own, which may depend on earlier draws.

    ``expected [n, V]`` are these. The sum of ``one_hot(drawn) - expected`` is a martingale with the
    covariance ``sum(diag(p) - p p^T)``, so its quadratic form is chi-square with the rank of it.
    """
    p = expected.double()
    seen = torch.nn.functional.one_hot(torch.tensor(drawn), p.shape[1]).double()
    surplus, covariance = (seen - p).sum(0), p.sum(0).diag() - p.T @ p
    if bool(((seen > 0) & (p == 0)).any()):
        return 0.0
    inverse = torch.linalg.pinv(covariance, hermitian=True, rtol=1e-9)
    freedom = int(torch.linalg.matrix_rank(covariance, hermitian=True, rtol=1e-9))
    return survival(float(surplus @ inverse @ surplus), freedom)
