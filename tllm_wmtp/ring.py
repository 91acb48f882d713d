"""The ring of one draft layer: capacity, slots, visibility, and the pool of lanes.

Everything is answered by the native header that the kernels use; Python holds no second formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch  # noqa: F401  (brings the OpenMP runtime that the native library shares)

from tllm_wmtp import _core
from tllm_wmtp._core import Lane, LanePool

__all__ = ["Lane", "LanePool", "RingSpec", "SlotSegment"]

# (first position, first slot, count): consecutive positions in consecutive slots.
SlotSegment = tuple[int, int, int]


@dataclass(frozen=True)
class RingSpec:
    """Shape of a ring: ``n_sink`` first positions for ever, the last ``window``, and ``spare``.

    ``spare`` slots hold rows that may yet be rejected, so that writing them never overwrites what a
    query of the shorter, rolled-back sequence sees. A chain that emits at most ``depth`` tokens per
    step uses ``spare = depth``; a tree of width k uses ``depth * k``.
    """

    n_sink: int
    window: int
    spare: int

    def __post_init__(self) -> None:
        if self.n_sink < 0:
            raise ValueError(f"n_sink {self.n_sink} < 0: sinks are a count; pass 0 for none")
        if self.window < 1:
            raise ValueError(
                f"window {self.window} < 1: a query sees at least its own key; raise window"
            )
        if self.spare < 0:
            raise ValueError(
                f"spare {self.spare} < 0: spare is a count of slots; pass the draft depth"
            )

    @classmethod
    def for_chain(cls, n_sink: int, window: int, depth: int, width: int = 1) -> RingSpec:
        """Ring of a draft of ``depth`` tokens per step; ``width`` > 1 for a tree."""
        if depth < 2:
            raise ValueError(f"depth {depth} < 2: a step drafts at least one token; raise depth")
        if width < 1:
            raise ValueError(
                f"width {width} < 1: a tree has at least one branch; pass 1 for a chain"
            )
        return cls(n_sink, window, depth * width)

    @property
    def capacity(self) -> int:
        """Slots of one lane."""
        return self.n_sink + self.window + self.spare

    def slot(self, position: int) -> int:
        """Slot that holds ``position``."""
        if position < 0:
            raise ValueError(f"position {position} < 0: positions count from the first token")
        return int(_core.ring_slot(self.n_sink, self.capacity, position))

    def surviving_positions(self, start: int, n_rows: int) -> list[int]:
        """Of the rows at ``start .. start + n_rows - 1``, the positions that an append stores."""
        if start < 0 or n_rows < 0:
            raise ValueError(
                f"append of {n_rows} rows at {start}: both must be >= 0; pass the lane's length"
            )
        sink, tail = _core.ring_survivors(self.n_sink, self.capacity, start, n_rows)
        return [*range(*sink), *range(*tail)]

    def visible_positions(self, query: int) -> list[int]:
        """Positions that a query at ``query`` attends to, ascending."""
        if query < 0:
            raise ValueError(f"query {query} < 0: positions count from the first token")
        sink, window = _core.ring_visible_ranges(self.n_sink, self.window, query)
        return [*range(*sink), *range(*window)]

    def visible_segments(self, query: int) -> list[SlotSegment]:
        """The same as at most one sink segment and two window segments of slots."""
        if query < 0:
            raise ValueError(f"query {query} < 0: positions count from the first token")
        return list(_core.ring_visible_segments(self.n_sink, self.capacity, self.window, query))
