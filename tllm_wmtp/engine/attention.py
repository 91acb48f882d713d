"""Windowed draft attention as graph nodes: the plugin, or the same contract in standard ops.

Both append the rows of every request to its lane's ring and answer at most one row of each. The
standard lowering is the specification that runs anywhere; it copies the rings, which the plugin
updates in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tllm_wmtp.engine import plugin
from tllm_wmtp.engine.graph import Graph, Value

PLUGIN, STANDARD = "plugin", "standard"


@dataclass(frozen=True)
class Ring:
    """Shape of the rings ``[lanes, capacity, num_kv_heads, head_dim]`` and what a query sees."""

    lanes: int
    capacity: int
    n_sink: int
    window: int
    num_kv_heads: int
    head_dim: int

    @property
    def shape(self) -> list[int]:
        return [self.lanes, self.capacity, self.num_kv_heads, self.head_dim]


@dataclass(frozen=True)
class Batch:
    """Which rows belong to whom; see :mod:`tllm_wmtp.engine.draft`.

    ``row_offsets`` and ``query_offsets`` are int32 ``[b + 1]``, ``starts`` int64 ``[b]``, ``lanes``
    int32 ``[b]``, ``ring_k`` and ``ring_v`` the graph's rings.
    """

    row_offsets: Value
    query_offsets: Value
    starts: Value
    lanes: Value
    ring_k: Value
    ring_v: Value


def answered_rows(g: Graph, batch: Batch, row_count: Value) -> tuple[Value, Value]:
    """Of each answer ``[b]``: its row, and its request (int64).

    Answer j belongs to the request whose ``query_offsets`` enclose it, and a request's answers are
    its last rows. Answers beyond the last offset are padding: they get some row and request.
    """
    requests = g.op("Shape", batch.lanes, dtype="int64")
    count = g.op("Squeeze", requests, g.ints(0))
    answers = g.op("Range", g.scalar(0, "int64"), count, g.scalar(1, "int64"))
    owner = _owner(g, answers, batch.query_offsets, count)
    last_row = _at(g, g.cast(batch.row_offsets, "int64"), owner, 1)
    last_answer = _at(g, g.cast(batch.query_offsets, "int64"), owner, 1)
    row = g.op("Add", g.op("Sub", last_row, last_answer), answers)
    top = g.op("Sub", row_count, g.scalar(1, "int64"))
    return g.op("Max", g.op("Min", row, top), g.scalar(0, "int64")), owner


def windowed_draft_attention(
    g: Graph,
    q: Value,
    k: Value,
    v: Value,
    batch: Batch,
    ring: Ring,
    num_heads: int,
    scale: float,
    lowering: str,
    owner: Value,
    query_positions: Value,
) -> tuple[Value, Value, Value]:
    """``q [b, Hq, D]``, rotated ``k`` and unrotated ``v [n, Hkv, D]`` to the answers ``[b, Hq, D]``
    and both rings after the append.

    ``owner`` and ``query_positions [b]`` say whose row an answer is and where it stands.
    """
    if lowering == PLUGIN:
        return _plugin_node(g, q, k, v, batch, ring, num_heads, scale)
    return _standard(g, q, k, v, batch, ring, num_heads, scale, owner, query_positions)


def _plugin_node(
    g: Graph,
    q: Value,
    k: Value,
    v: Value,
    batch: Batch,
    ring: Ring,
    num_heads: int,
    scale: float,
) -> tuple[Value, Value, Value]:
    inputs = [q, k, v, batch.row_offsets, batch.query_offsets, batch.starts, batch.lanes]
    rings = [batch.ring_k, batch.ring_v]
    out, ring_k, ring_v = g.ops(
        plugin.NAME,
        [*inputs, *rings],
        [q.dtype, *(one.dtype for one in rings)],
        domain=plugin.NAMESPACE,
        names=["attention", "ring_k_out", "ring_v_out"],
        plugin_version=plugin.VERSION,
        plugin_namespace=plugin.NAMESPACE,
        n_sink=ring.n_sink,
        window=ring.window,
        capacity=ring.capacity,
        num_q_heads=num_heads,
        num_kv_heads=ring.num_kv_heads,
        head_dim=ring.head_dim,
        scale=float(scale),
    )
    return out, ring_k, ring_v


def _standard(
    g: Graph,
    q: Value,
    k: Value,
    v: Value,
    batch: Batch,
    ring: Ring,
    num_heads: int,
    scale: float,
    owner: Value,
    query_positions: Value,
) -> tuple[Value, Value, Value]:
    newest = newest_positions(g, batch, ring)
    lane_k, ring_k = _append(g, k, batch.ring_k, "ring_k_out", newest, batch)
    lane_v, ring_v = _append(g, v, batch.ring_v, "ring_v_out", newest, batch)

    groups = num_heads // ring.num_kv_heads
    grouped = g.op("Reshape", q, g.ints(0, ring.num_kv_heads, groups, ring.head_dim))
    keys = g.op("Transpose", g.op("Gather", lane_k, owner, axis=0), perm=[0, 2, 3, 1])
    values = g.op("Transpose", g.op("Gather", lane_v, owner, axis=0), perm=[0, 2, 1, 3])
    scores = g.cast(g.op("MatMul", grouped, keys), "float32")  # [b, Hkv, groups, capacity]
    scores = _wide(g, "Mul", scores, g.scalar(scale, "float32"))

    held = g.op("Gather", newest, owner, axis=0)  # [b, capacity]
    position = g.op("Unsqueeze", query_positions, g.ints(1))
    oldest = g.op("Sub", position, g.scalar(ring.window, "int64"))
    recent = g.op("Greater", held, oldest, dtype="bool")
    sink = g.op("Less", held, g.scalar(ring.n_sink, "int64"), dtype="bool")
    visible = g.op("Or", recent, sink, dtype="bool")
    written = g.op("GreaterOrEqual", held, g.scalar(0, "int64"), dtype="bool")
    past = g.op("LessOrEqual", held, position, dtype="bool")
    visible = g.op("And", visible, g.op("And", written, past, dtype="bool"), dtype="bool")
    mask = g.op("Unsqueeze", visible, g.ints(1, 2))
    (scores,) = g.ops("Where", [mask, scores, g.scalar(-3.0e38, "float32")], ["float32"])

    weights = g.cast(_wide(g, "Softmax", scores, axis=-1), q.dtype)
    out = g.op("MatMul", weights, values)
    return g.op("Reshape", out, g.ints(0, num_heads, ring.head_dim)), ring_k, ring_v


def newest_positions(g: Graph, batch: Batch, ring: Ring) -> Value:
    """The position that each slot of each request's ring holds after the append, int64
    ``[b, capacity]``; negative where nothing has been written.

    A slot s >= n_sink holds the last position p < end with ``(p - s) mod (capacity - n_sink) = 0``.
    """
    import torch

    slots = torch.arange(ring.capacity, dtype=torch.int64)
    ends = g.op("Add", batch.starts, _counts(g, batch))
    last = g.op("Sub", g.op("Unsqueeze", ends, g.ints(1)), g.scalar(1, "int64"))  # [b, 1]
    turn = g.scalar(ring.capacity - ring.n_sink, "int64")
    behind = g.op("Mod", g.op("Sub", last, g.constant(slots, "slots")), turn)
    held = g.op("Sub", last, behind)
    # Before the ring's first turn is full, a slot's last position lies before the slot itself.
    held = g.op(
        "Where",
        g.op("Less", held, g.constant(slots, "slots"), dtype="bool"),
        g.scalar(-1, "int64"),
        held,
        dtype="int64",
    )
    own = g.constant(slots, "slots")
    sink_held = g.op(
        "Where",
        g.op("LessOrEqual", own, last, dtype="bool"),
        own,
        g.scalar(-1, "int64"),
        dtype="int64",
    )
    return g.op(
        "Where",
        g.op("Less", own, g.scalar(ring.n_sink, "int64"), dtype="bool"),
        sink_held,
        held,
        dtype="int64",
    )


def _append(
    g: Graph, x: Value, pool: Value, name: str, newest: Value, batch: Batch
) -> tuple[Value, Value]:
    """Rows ``x [n, Hkv, D]`` into the rings: the requests' lanes ``[b, capacity, Hkv, D]`` after
    it, and all lanes.

    A slot takes the row whose position it holds now, if that row is one of this call: each slot is
    written at most once, and only by rows that survive.
    """
    starts = g.op("Unsqueeze", batch.starts, g.ints(1))
    fresh = g.op("GreaterOrEqual", newest, starts, dtype="bool")  # [b, capacity]
    first = g.op("Slice", g.cast(batch.row_offsets, "int64"), g.ints(0), g.ints(-1))
    row = g.op("Add", g.op("Sub", newest, starts), g.op("Unsqueeze", first, g.ints(1)))
    row = g.op("Where", fresh, row, g.scalar(0, "int64"), dtype="int64")
    fresh = g.op("Unsqueeze", fresh, g.ints(2, 3))
    stored = g.cast(g.op("Gather", x, row, axis=0), pool.dtype)
    lane = g.op("Gather", pool, batch.lanes, axis=0)
    lane = g.op("Where", fresh, stored, lane, dtype=pool.dtype)
    indices = g.op("Unsqueeze", g.cast(batch.lanes, "int64"), g.ints(1))
    (whole,) = g.ops("ScatterND", [pool, indices, lane], [pool.dtype], names=[name])
    return g.cast(lane, x.dtype), whole


def _counts(g: Graph, batch: Batch) -> Value:
    """Rows of each request, int64 ``[b]``."""
    offsets = g.cast(batch.row_offsets, "int64")
    ends = g.op("Slice", offsets, g.ints(1), g.ints(2**31 - 1))
    return g.op("Sub", ends, g.op("Slice", offsets, g.ints(0), g.ints(-1)))


def _owner(g: Graph, items: Value, offsets: Value, count: Value) -> Value:
    """The request whose range of ``offsets [b + 1]`` encloses each of ``items``; b - 1 beyond."""
    ends = g.op("Slice", g.cast(offsets, "int64"), g.ints(1), g.ints(2**31 - 1))
    after = g.op("GreaterOrEqual", g.op("Unsqueeze", items, g.ints(1)), ends, dtype="bool")
    owner = g.op("ReduceSum", g.cast(after, "int64"), g.ints(1), keepdims=0)
    return g.op("Min", owner, g.op("Sub", count, g.scalar(1, "int64")))


def _at(g: Graph, x: Value, index: Value, shift: int) -> Value:
    return g.op("Gather", x, g.op("Add", index, g.scalar(shift, "int64")), axis=0)


def _wide(g: Graph, kind: str, *inputs: Value, **fields: Any) -> Value:
    """A float32 operation that no rounding touches."""
    return g.ops(kind, inputs, ["float32"], **fields)[0]
