"""The verify graph: one forward of a dense decoder with full attention over linear KV caches.

Of each of B lanes (a fixed number), the graph appends T rows after ``starts[b]`` committed ones and
answers all of them. KV cache update and attention are the standard operators TensorScatter and
Attention, which TensorRT compiles to its own and onnxruntime runs as they are.

==================== ========================= =========== =====================================
``token_ids``        ``[B, T]``                int64       rows of each lane
``starts``           ``[B]``                   int64       committed rows; where the new ones go
``logit_rows``       ``[B, m]``                int64       rows (0 .. T - 1) whose logits are read
``k_cache_<i> v_``   ``[B, Hkv, S, D]``        network's   of the i-th layer, updated in place
-------------------- ------------------------- ----------- -------------------------------------
``hidden``           ``[B, T, H]``             network's   what the draft head reads
``logits``           ``[B, m, vocab]``         network's
``tokens``           ``[B, m]``                int64       most likely ones
``k_cache_<i>_out`` like the caches                        the same buffers
==================== ========================= =========== =====================================

Rolling back is a smaller ``starts``: rows after the committed ones are overwritten. A lane without
a request takes part with rows that nobody reads; its cache keeps what is committed. ``starts[b] +
T`` must not exceed S.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Graph, Profiles, Value, WrittenGraph
from tllm_wmtp.engine.heads.decoder import write_block
from tllm_wmtp.engine.weights import ModelSource
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.models.mimo import MimoTarget

#: TensorScatter came with it.
OPSET = 24


@dataclass(frozen=True)
class TargetSpec:
    """What a verify graph is made for; ``capacity`` is S, tokens that a lane can hold."""

    lanes: int
    capacity: int
    depth: int
    max_rows: int
    dtype: str = "float32"
    quantized: bool = False
    lowering: str = "standard"
    rounding: str | None = None


class _CacheAttention:
    """The layers' linear caches, one after the other, behind their attention; all rows are
    answered."""

    rows: Value | None = None

    def __init__(self, g: Graph, num_heads: int, scale: float, shape: list[int], rows: _Rows):
        self.g, self.num_heads, self.scale, self.shape = g, num_heads, scale, shape
        self.positions = self.row_positions = rows.positions
        self.starts, self.mask = rows.starts, rows.mask
        self.layer = 0

    def __call__(self, q: Value, k: Value, v: Value) -> Value:
        g, (lanes, kv_heads, _, head_dim) = self.g, self.shape
        caches = []
        for name, fresh in (("k_cache", k), ("v_cache", v)):
            label = f"{name}_{self.layer}"
            cache = g.input(label, g.dtype, self.shape)
            by_lane = g.op("Reshape", fresh, g.ints(lanes, -1, kv_heads, head_dim))
            rows = g.op("Transpose", by_lane, perm=[0, 2, 1, 3])  # [B, Hkv, T, D]
            (updated,) = g.ops(
                "TensorScatter",
                [cache, rows, self.starts],
                [g.dtype],
                names=[f"{label}_out"],
                axis=-2,
                mode="linear",
            )
            g.bind_output(updated, self.shape)
            caches.append(updated)
        self.layer += 1
        by_lane = g.op("Reshape", q, g.ints(lanes, -1, self.num_heads, head_dim))
        queries = g.op("Transpose", by_lane, perm=[0, 2, 1, 3])
        out = g.op("Attention", queries, *caches, self.mask, scale=self.scale)
        back = g.op("Transpose", out, perm=[0, 2, 1, 3])
        return g.op("Reshape", back, g.ints(-1, self.num_heads, head_dim))


@dataclass(frozen=True)
class _Rows:
    """``positions [B * T]``, ``starts [B]``, and ``mask [B, 1, T, S]``: what each row sees."""

    positions: Value
    starts: Value
    mask: Value


def check_target(source: ModelSource) -> None:
    """Refuses a target that has no graph.

    Raises:
        ConfigError: the family is not dense, or not made of one kind of full-attention block.
    """
    if not isinstance(source.target, MimoTarget):
        raise ConfigError(
            f"target of family {source.model_type!r}",
            "verify engines are made of dense decoders with full attention: mimo",
            "build its draft engine, and verify with the embedded runtime",
        )


def write_target_graph(source: ModelSource, spec: TargetSpec, folder: Path) -> WrittenGraph:
    """Writes ``target.onnx`` (and ``target.onnx.data`` for large weights) into ``folder``.

    Raises:
        ConfigError: see :func:`check_target`.
    """
    check_target(source)
    target: Any = source.target
    config = source.config
    shape = config.caches.attention
    g = Graph("target", folder, spec.dtype, spec.rounding, OPSET)
    token_ids = g.input("token_ids", "int64", [spec.lanes, "t"])
    starts = g.input("starts", "int64", [spec.lanes])
    logit_rows = g.input("logit_rows", "int64", [spec.lanes, "m"])
    rows = _rows(g, spec, token_ids, starts)
    cache_shape = [spec.lanes, shape.num_kv_heads, spec.capacity, shape.head_dim]
    attend = _CacheAttention(g, config.num_attention_heads, shape.scale, cache_shape, rows)

    e = Emitter(g, source.target_weights, spec.lowering, spec.quantized)
    embedding, projection = source.ends(None, None)
    embeddings = g.weight(embedding.tensor(), "embed_tokens")
    x = ops.rows(g, embeddings, g.op("Reshape", token_ids, g.ints(-1)))
    for index, block in enumerate(target.layers):
        x = write_block(e, block, f"layers.{index}", x, attend)
    size = config.hidden_size
    hidden = g.op("Reshape", x, g.ints(spec.lanes, -1, size))
    g.output(hidden, "hidden", [spec.lanes, "t", size])

    picked = ops.rows(g, x, _flat_rows(g, spec, token_ids, logit_rows))
    normed = e.emit(target.norm, "norm", picked)
    tied = projection.stored_name == embedding.stored_name
    logits = e.project(projection, normed, embeddings if tied else None)
    by_lane = g.op("Reshape", logits, g.ints(spec.lanes, -1, config.vocab_size))
    g.output(by_lane, "logits", [spec.lanes, "m", config.vocab_size])
    g.output(ops.argmax(g, by_lane), "tokens", [spec.lanes, "m"])

    file = folder / "target.onnx"
    onnx.save(g.model(), str(file))
    lanes, depth, most = spec.lanes, spec.depth, spec.max_rows
    profiles: Profiles = {
        "token_ids": ((lanes, 1), (lanes, depth), (lanes, most)),
        "logit_rows": ((lanes, 1), (lanes, depth), (lanes, depth)),
    }
    facts: dict[str, int | str] = {
        "lanes": lanes,
        "capacity": spec.capacity,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "layers": config.num_hidden_layers,
        "dtype": spec.dtype,
    }
    return WrittenGraph(file, profiles, facts, g.inputs, g.outputs, tuple(e.quantized_weights))


def _rows(g: Graph, spec: TargetSpec, token_ids: Value, starts: Value) -> _Rows:
    """A row at position p sees the keys at 0 .. p of its own lane."""
    steps = g.op("Range", g.scalar(0, "int64"), _row_count(g, token_ids), g.scalar(1, "int64"))
    positions = g.op("Add", g.op("Unsqueeze", starts, g.ints(1)), steps)  # [B, T]
    keys = g.constant(torch.arange(spec.capacity), "key_positions")
    seen = g.op("LessOrEqual", keys, g.op("Unsqueeze", positions, g.ints(1, 3)), dtype="bool")
    return _Rows(g.op("Reshape", positions, g.ints(-1)), starts, seen)


def _row_count(g: Graph, token_ids: Value) -> Value:
    """T, of rank 0."""
    shape = g.op("Shape", token_ids, dtype="int64")
    return g.op("Squeeze", g.op("Slice", shape, g.ints(1), g.ints(2)), g.ints(0))


def _flat_rows(g: Graph, spec: TargetSpec, token_ids: Value, logit_rows: Value) -> Value:
    """Indices ``[B * m]`` into the rows of all lanes."""
    lanes = g.constant(torch.arange(spec.lanes).unsqueeze(1), "lane_numbers")
    first = g.op("Mul", lanes, _row_count(g, token_ids))
    return g.op("Reshape", g.op("Add", logit_rows, first), g.ints(-1))
