"""What a draft head's graph is written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Graph, Value


class Attention(Protocol):
    """Who owns the rings: takes all rows' keys and values and the answered rows' queries.

    ``rows`` are the answered rows among all, None where all are answered; ``positions`` and
    ``row_positions`` are those of all rows and of the answered ones.
    """

    rows: Value | None
    positions: Value
    row_positions: Value

    def __call__(self, q: Value, k: Value, v: Value) -> Value:
        """``q [b, Hq, D]``, rotated ``k`` and ``v [n, Hkv, D]`` to ``[b, Hq, D]``."""
        ...


def answered(g: Graph, x: Value, attend: Attention) -> Value:
    """The answered rows of ``x [n, ...]``."""
    return x if attend.rows is None else ops.rows(g, x, attend.rows)


@dataclass(frozen=True)
class HeadWriter:
    """How the graph of one class of head is written.

    Args:
        write: (emitter, head module, embeddings ``[n, H]``, hidden ``[n, H]``, attention) to the
            head's output ``[b, H]``.
        embedding, projection: the head's own modules for tokens and logits; None for the target's.
    """

    write: Callable[[Emitter, Any, Value, Value, Attention], Value]
    embedding: str | None = None
    projection: str | None = None
