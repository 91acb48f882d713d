"""How the draft head of each family becomes graph nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value
from tllm_wmtp.models.layers.rope import RopeConfig


@dataclass(frozen=True)
class AttentionShape:
    """Of a head's one attention layer; ``rope`` is None where it has no positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


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


#: (emitter, head module, embeddings [n, H], hidden [n, H], attention) to the head's output [b, H].
WriteHead = Callable[[Emitter, Any, Value, Value, Attention], Value]


def write_head(module: Any) -> WriteHead:
    """The writer of a head module's class.

    Raises:
        ConfigError: no graph of this class is known.
    """
    from tllm_wmtp.engine.heads import qwen3_5
    from tllm_wmtp.errors import ConfigError

    writers: dict[str, WriteHead] = {"Qwen3_5MtpHead": qwen3_5.write}
    name = type(module).__name__
    if name not in writers:
        raise ConfigError(
            f"draft head {name}",
            f"engines are made of {', '.join(sorted(writers))}",
            "run this checkpoint on the embedded runtime",
        )
    return writers[name]


__all__ = ["Attention", "AttentionShape", "RopeConfig", "WriteHead", "write_head"]
