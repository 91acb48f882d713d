"""The draft graph: one forward of a checkpoint's MTP head over its rings.

Of each of b requests, the graph appends n_b rows and answers at most one, the last. Names, shapes
and types of its tensors:

=================== ============================ =========== ==================================
``token_ids``       ``[n]``                      int64       token after each row
``hidden``          ``[n, H]``                   network's   hidden state of each row
``positions``       ``[n]``                      int64       where each row stands
``row_offsets``     ``[b + 1]``                  int32       rows of request i: [i], [i + 1)
``query_offsets``   ``[b + 1]``                  int32       answers of request i: none or one
``start_positions`` ``[b]``                      int64       position of each one's first row
``lanes``           ``[b]``                      int32       whose ring; distinct
``ring_k ring_v``   ``[lanes, R, Hkv, D]``       ring's      updated in place
------------------- ---------------------------- ----------- ----------------------------------
``next_hidden``     ``[b, H]``                   network's   of each answer
``draft_tokens``    ``[b]``                      int64       most likely token
``logits``          ``[b, vocab]``               network's   where ``top_k`` is 0
``top_k_ids``       ``[b, k]``                   int64       where it is not
``top_k_logits``    ``[b, k]``                   network's
``ring_k_out ...``  like the rings                           the same buffers under the plugin
=================== ============================ =========== ==================================

Rows and answers beyond the last offset are padding: what they hold is read by no one, and they
write nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.attention import (
    PLUGIN,
    STANDARD,
    Batch,
    Ring,
    answered_rows,
    windowed_draft_attention,
)
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Graph, Profiles, Value, WrittenGraph
from tllm_wmtp.engine.heads import head_writer
from tllm_wmtp.engine.weights import ModelSource
from tllm_wmtp.ring import RingSpec

__all__ = ["PLUGIN", "STANDARD", "DraftSpec", "WrittenGraph", "write_draft_graph"]


@dataclass(frozen=True)
class DraftSpec:
    """What a draft graph is made for.

    Args:
        ring: sinks, window and spare slots of each lane.
        lanes: rings, hence requests at a time.
        max_rows: most rows of one forward, all requests together.
        dtype: of the network and the rings.
        top_k: how many candidates the graph gives; 0 for all logits.
        quantized: keep NVFP4 weights as they are.
        lowering: :data:`PLUGIN` or :data:`STANDARD`.
        rounding: see :class:`~tllm_wmtp.engine.graph.Graph`.
    """

    ring: RingSpec
    lanes: int
    max_rows: int
    dtype: str = "float32"
    top_k: int = 0
    quantized: bool = False
    lowering: str = STANDARD
    rounding: str | None = None


class _RingAttention:
    """The graph's rings behind the head's attention layer."""

    rows: Value | None

    def __init__(
        self,
        g: Graph,
        batch: Batch,
        ring: Ring,
        num_heads: int,
        scale: float,
        lowering: str,
        positions: Value,
    ):
        self.g, self.batch, self.ring = g, batch, ring
        self.num_heads, self.scale, self.lowering = num_heads, scale, lowering
        self.positions = positions
        row_count = g.op("Squeeze", g.op("Shape", positions, dtype="int64"), g.ints(0))
        rows, self.owner = answered_rows(g, batch, row_count)
        self.rows, self.row_positions = rows, ops.rows(g, positions, rows)
        self.rings: tuple[Value, Value] | None = None

    def __call__(self, q: Value, k: Value, v: Value) -> Value:
        out, ring_k, ring_v = windowed_draft_attention(
            self.g,
            q,
            k,
            v,
            self.batch,
            self.ring,
            self.num_heads,
            self.scale,
            self.lowering,
            self.owner,
            self.row_positions,
        )
        self.rings = ring_k, ring_v
        return out


def write_draft_graph(source: ModelSource, spec: DraftSpec, folder: Path) -> WrittenGraph:
    """Writes ``draft.onnx`` (and ``draft.onnx.data`` for large weights) into ``folder``."""
    writer = head_writer(source.head)
    config, shape = source.config, source.config.caches.draft
    hidden_size, vocab = config.hidden_size, config.vocab_size
    num_heads = config.num_attention_heads
    g = Graph("draft", folder, spec.dtype, spec.rounding)

    token_ids = g.input("token_ids", "int64", ["n"])
    hidden = g.input("hidden", spec.dtype, ["n", hidden_size])
    positions = g.input("positions", "int64", ["n"])
    ring = Ring(
        spec.lanes,
        spec.ring.capacity,
        spec.ring.n_sink,
        spec.ring.window,
        shape.num_kv_heads,
        shape.head_dim,
    )
    batch = Batch(
        row_offsets=g.input("row_offsets", "int32", ["b_plus_1"]),
        query_offsets=g.input("query_offsets", "int32", ["b_plus_1"]),
        starts=g.input("start_positions", "int64", ["b"]),
        lanes=g.input("lanes", "int32", ["b"]),
        ring_k=g.input("ring_k", spec.dtype, ring.shape),
        ring_v=g.input("ring_v", spec.dtype, ring.shape),
    )
    attend = _RingAttention(g, batch, ring, num_heads, shape.scale, spec.lowering, positions)

    embedding, projection = source.ends(writer.embedding, writer.projection)
    own = Emitter(g, source.head_weights, spec.lowering, spec.quantized)
    embeddings = g.weight(embedding.tensor(), "embed_tokens")
    next_hidden = writer.write(own, source.head, ops.rows(g, embeddings, token_ids), hidden, attend)
    ending = Emitter(g, projection.weights, spec.lowering, spec.quantized)
    tied = projection.stored_name == embedding.stored_name
    logits = ending.project(projection, next_hidden, embeddings if tied else None)

    g.output(next_hidden, "next_hidden", ["b", hidden_size])
    g.output(ops.argmax(g, logits), "draft_tokens", ["b"])
    if spec.top_k:
        values, ids = ops.top_k(g, logits, spec.top_k)
        g.output(ids, "top_k_ids", ["b", spec.top_k])
        g.output(values, "top_k_logits", ["b", spec.top_k])
    else:
        g.output(logits, "logits", ["b", vocab])
    assert attend.rings is not None
    for value in attend.rings:
        g.bind_output(value, ring.shape)

    file = folder / "draft.onnx"
    onnx.save(g.model(), str(file))
    return WrittenGraph(
        file,
        _profiles(spec, hidden_size),
        {**asdict(ring), "dtype": spec.dtype},
        g.inputs,
        g.outputs,
        (*own.quantized_weights, *ending.quantized_weights),
    )


def _profiles(spec: DraftSpec, hidden_size: int) -> Profiles:
    lanes, most = spec.lanes, spec.max_rows
    usual = min(most, lanes)
    rows = ((1,), (usual,), (most,))
    requests = ((1,), (usual,), (lanes,))
    offsets = ((2,), (usual + 1,), (lanes + 1,))
    wide = tuple((n[0], hidden_size) for n in rows)
    return {
        "token_ids": rows,
        "hidden": (wide[0], wide[1], wide[2]),
        "positions": rows,
        "row_offsets": offsets,
        "query_offsets": offsets,
        "start_positions": requests,
        "lanes": requests,
    }
