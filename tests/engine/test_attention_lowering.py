"""The standard-op lowering of windowed draft attention against a dictionary of positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from attention_oracle import Oracle

from tllm_wmtp.engine.attention import (
    STANDARD,
    Batch,
    Ring,
    answered_rows,
    windowed_draft_attention,
)
from tllm_wmtp.engine.graph import Graph
from tllm_wmtp.engine.ops import rows

HEADS, KV_HEADS, DIM, SCALE, LANES = 4, 2, 8, 0.3, 5


def session(ring: Ring) -> Any:
    """A graph of one attention node: queries of all rows in, answers of the last ones out."""
    g = Graph("attention")
    q = g.input("q", "float32", ["n", HEADS, DIM])
    k = g.input("k", "float32", ["n", KV_HEADS, DIM])
    v = g.input("v", "float32", ["n", KV_HEADS, DIM])
    positions = g.input("positions", "int64", ["n"])
    batch = Batch(
        g.input("row_offsets", "int32", ["b1"]),
        g.input("query_offsets", "int32", ["b1"]),
        g.input("start_positions", "int64", ["b"]),
        g.input("lanes", "int32", ["b"]),
        g.input("ring_k", "float32", ring.shape),
        g.input("ring_v", "float32", ring.shape),
    )
    count = g.op("Squeeze", g.op("Shape", positions, dtype="int64"), g.ints(0))
    row, owner = answered_rows(g, batch, count)
    out, ring_k, ring_v = windowed_draft_attention(
        g, rows(g, q, row), k, v, batch, ring, HEADS, SCALE, STANDARD, owner,
        rows(g, positions, row),
    )  # fmt: skip
    g.output(out, "out", ["b", HEADS, DIM])
    g.bind_output(ring_k, ring.shape)
    g.bind_output(ring_v, ring.shape)
    model = g.model().SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("n_sink", "window", "depth"), [(3, 8, 4), (0, 5, 3), (4, 1, 2), (0, 1, 5), (6, 20, 7)]
)
def test_ragged_steps_with_rollback_see_sinks_and_window_at_every_wrap(
    n_sink: int, window: int, depth: int
) -> None:
    """Each step appends 0 .. depth rows to some requests, after taking back as many as a step may
    refuse; some requests ask nothing, and padding follows rows and answers."""
    ring = Ring(LANES, n_sink + window + depth, n_sink, window, KV_HEADS, DIM)
    run, oracle = session(ring), Oracle(n_sink, window, SCALE)
    random = np.random.default_rng(n_sink * 100 + window)
    rings = [np.zeros(ring.shape, np.float32) for _ in range(2)]
    lengths, fed = [0] * LANES, [0] * LANES  # fed: positions ever written
    turns = 0
    while min(lengths) < 4 * ring.capacity:
        turns += 1
        order = random.permutation(LANES)[: random.integers(1, LANES + 1)]
        counts = [int(random.integers(0 if lengths[lane] else 1, depth + 1)) for lane in order]
        if turns == 1 or not any(counts):
            counts[0] = depth + ring.capacity  # a prefill chunk that overruns the ring
        asks = [count > 0 and random.random() < 0.8 for count in counts]
        padding = int(random.integers(0, 3))
        total = sum(counts) + padding
        q = random.standard_normal((total, HEADS, DIM), dtype=np.float32)
        k, v = (random.standard_normal((total, KV_HEADS, DIM), dtype=np.float32) for _ in "kv")
        starts = [
            lengths[lane] - int(random.integers(0, depth))
            if count and lengths[lane] == fed[lane] >= depth
            else lengths[lane]
            for lane, count in zip(order, counts, strict=True)
        ]
        offsets = np.cumsum([0, *counts]).astype(np.int32)
        positions = np.zeros(total, np.int64)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            positions[offsets[i] : offsets[i + 1]] = range(start, start + count)
        feed = {
            "q": q, "k": k, "v": v, "positions": positions, "row_offsets": offsets,
            "query_offsets": np.cumsum([0, *asks]).astype(np.int32),
            "start_positions": np.array(starts, np.int64),
            "lanes": order.astype(np.int32), "ring_k": rings[0], "ring_v": rings[1],
        }  # fmt: skip
        out, *rings = run.run(["out", "ring_k_out", "ring_v_out"], feed)
        answer = 0
        for i, lane in enumerate(order):
            mine = slice(offsets[i], offsets[i + 1])
            if counts[i]:
                oracle.append(lane, starts[i], k[mine], v[mine])
                lengths[lane] = starts[i] + counts[i]
                fed[lane] = max(fed[lane], lengths[lane])
            if asks[i]:
                last = offsets[i + 1] - 1
                expected = oracle.answer(lane, int(positions[last]), q[last])
                np.testing.assert_allclose(out[answer], expected, atol=2e-5)
                answer += 1
    assert turns > 20


def drafts_and_rolls_back(spare: int) -> None:
    """Feeds ``depth`` rows, then one row again from the first one's position, and so on."""
    n_sink, window, depth = 2, 6, 4
    ring = Ring(LANES, n_sink + window + spare, n_sink, window, KV_HEADS, DIM)
    run, oracle = session(ring), Oracle(n_sink, window, SCALE)
    random = np.random.default_rng(0)
    rings = [np.zeros(ring.shape, np.float32) for _ in range(2)]
    for step in range(60):
        start, count = step // 2, depth if step % 2 == 0 else 1
        q = random.standard_normal((count, HEADS, DIM), dtype=np.float32)
        k, v = (random.standard_normal((count, KV_HEADS, DIM), dtype=np.float32) for _ in "kv")
        feed = {
            "q": q, "k": k, "v": v, "positions": np.arange(start, start + count),
            "row_offsets": np.array([0, count], np.int32),
            "query_offsets": np.array([0, 1], np.int32),
            "start_positions": np.array([start]), "lanes": np.array([0], np.int32),
            "ring_k": rings[0], "ring_v": rings[1],
        }  # fmt: skip
        out, *rings = run.run(["out", "ring_k_out", "ring_v_out"], feed)
        oracle.append(0, start, k, v)
        expected = oracle.answer(0, start + count - 1, q[-1])
        np.testing.assert_allclose(out[0], expected, atol=2e-5)


def test_spare_slots_keep_the_window_of_a_shortened_sequence() -> None:
    drafts_and_rolls_back(spare=4)


def test_ring_without_spare_slots_loses_keys() -> None:
    with pytest.raises(AssertionError):
        drafts_and_rolls_back(spare=0)
