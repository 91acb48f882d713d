"""Windowed attention over a dictionary of positions, in float64: no ring, no slots."""

from __future__ import annotations

import numpy as np

Rows = dict[int, tuple[np.ndarray, np.ndarray]]


class Oracle:
    """Keys and values of each lane by position; a rollback is a smaller next position."""

    def __init__(self, n_sink: int, window: int, scale: float):
        self.n_sink, self.window, self.scale = n_sink, window, scale
        self.lanes: dict[int, Rows] = {}

    def append(self, lane: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """``k, v [n, Hkv, D]`` from position ``start``."""
        held = self.lanes.setdefault(lane, {})
        for position in [p for p in held if p >= start]:
            del held[position]
        for i in range(k.shape[0]):
            held[start + i] = (k[i].astype(np.float64), v[i].astype(np.float64))

    def answer(self, lane: int, query: int, q: np.ndarray) -> np.ndarray:
        """``q [Hq, D]`` at position ``query``."""
        seen = [
            pair
            for position, pair in sorted(self.lanes[lane].items())
            if position <= query and (position < self.n_sink or position > query - self.window)
        ]
        keys = np.stack([pair[0] for pair in seen])
        values = np.stack([pair[1] for pair in seen])
        group = q.shape[0] // keys.shape[1]
        out = np.empty(q.shape)
        for head in range(q.shape[0]):
            scores = keys[:, head // group] @ q[head].astype(np.float64) * self.scale
            weights = np.exp(scores - scores.max())
            out[head] = weights @ values[:, head // group] / weights.sum()
        return out
