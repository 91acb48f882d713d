"""What a draft head's graph is written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value


class Attention(Protocol):
    """Who owns the rings: takes all rows' keys and values and the answered rows' queries.

    ``rows`` are the answered rows among all, ``positions`` and ``row_positions`` those of all rows
    and of the answered ones.
    """

    rows: Value
    positions: Value
    row_positions: Value

    def __call__(self, q: Value, k: Value, v: Value) -> Value:
        """``q [b, Hq, D]``, rotated ``k`` and ``v [n, Hkv, D]`` to ``[b, Hq, D]``."""
        ...


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
