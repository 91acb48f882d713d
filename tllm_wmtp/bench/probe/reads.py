"""Ways to read the same keys: which of them count, and which value each of them brings.

A read turns scores into the weight of every value. ``sum_i p_i v_s(i)`` over values shuffled by a
permutation s is the sum over the values as they are with shuffled weights, and values replaced by
their mean are weights replaced by theirs: so the values themselves are never copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

#: Parts of what a query may see: the first ``n_sink`` keys, the other visible ones, and the keys
#: that a windowed read leaves out. ``UNSEEN`` are later than the query.
BANDS = ("sink", "window", "tail")
SINK, WINDOW, TAIL, UNSEEN = range(4)


@dataclass(frozen=True)
class Places:
    """Where keys and queries stand: ``keys [n, K]`` and ``queries [n]`` are positions."""

    keys: torch.Tensor
    queries: torch.Tensor

    def bands(self, window: int, n_sink: int) -> torch.Tensor:
        """``[n, K]`` of SINK, WINDOW, TAIL and UNSEEN, each key in one of them."""
        keys, queries = self.keys, self.queries[:, None]
        bands = torch.full_like(keys, TAIL, dtype=torch.uint8)
        bands[keys > queries - window] = WINDOW
        bands[keys < n_sink] = SINK
        bands[keys > queries] = UNSEEN
        return bands


class Read(Protocol):
    def weights(self, scores: torch.Tensor, places: Places) -> torch.Tensor:
        """Weight ``[Hq, n, K]`` of each value, from scaled ``scores [Hq, n, K]``."""
        ...


def softmax_over(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax of ``scores [Hq, n, K]`` over the keys ``seen [n, K]``."""
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


class NativeRead:
    """Every key up to the query's own."""

    def weights(self, scores: torch.Tensor, places: Places) -> torch.Tensor:
        return softmax_over(scores, places.keys <= places.queries[:, None])


@dataclass(frozen=True)
class WindowedRead:
    """Sink and window: the tail's mass goes to them, in proportion."""

    window: int
    n_sink: int

    def weights(self, scores: torch.Tensor, places: Places) -> torch.Tensor:
        return softmax_over(scores, places.bands(self.window, self.n_sink) < TAIL)


@dataclass(frozen=True)
class MeanRead:
    """The native weights, with every value of one band replaced by that band's mean value."""

    band: int
    window: int
    n_sink: int

    def weights(self, scores: torch.Tensor, places: Places) -> torch.Tensor:
        weights = NativeRead().weights(scores, places)
        inside = places.bands(self.window, self.n_sink) == self.band
        mass = (weights * inside).sum(-1, keepdim=True)
        share = mass / inside.sum(-1).clamp(min=1)[:, None]
        return torch.where(inside, share, weights)


@dataclass(frozen=True)
class ShuffledRead:
    """The native weights, with the values of one band in another order, the same for all heads.

    Every query draws its own order from ``generator``.
    """

    band: int
    window: int
    n_sink: int
    generator: torch.Generator

    def weights(self, scores: torch.Tensor, places: Places) -> torch.Tensor:
        weights = NativeRead().weights(scores, places)
        bands = places.bands(self.window, self.n_sink)
        for query, band in enumerate(bands):
            inside = (band == self.band).nonzero().squeeze(-1)
            order = torch.randperm(inside.numel(), generator=self.generator)
            weights[:, query, inside] = weights[:, query, inside[order]]
        return weights
