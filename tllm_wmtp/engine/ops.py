"""One function per concept of a decoder, each a few nodes of a :class:`Graph`.

Rows are ``[n, features]`` in the graph's own type; norms, softmaxes and rotary tables are computed
in float32, as the embedded runtime does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tllm_wmtp.engine.graph import Graph, Value
from tllm_wmtp.models.layers.sigmoid_router import RouterConfig


def linear(g: Graph, x: Value, weight: torch.Tensor, bias: torch.Tensor | None, hint: str) -> Value:
    """``x [n, in]`` times ``weight [out, in]`` transposed, plus ``bias [out]``: ``[n, out]``."""
    out = g.op("MatMul", x, g.op("Transpose", g.weight(weight, hint), perm=[1, 0]))
    return out if bias is None else g.op("Add", out, g.weight(bias, f"{hint}.bias"))


def rms_norm(
    g: Graph, x: Value, scale: torch.Tensor, eps: float, hint: str, subtract_mean: bool = False
) -> Value:
    """``x / rms(x) * scale`` over the last axis; ``subtract_mean`` makes it a LayerNorm."""
    wide = _float(g, x)
    last = g.ints(-1)
    if subtract_mean:
        wide = _op(g, "Sub", wide, _op(g, "ReduceMean", wide, last, keepdims=1))
    mean = _op(g, "ReduceMean", _op(g, "Mul", wide, wide), last, keepdims=1)
    root = _op(g, "Sqrt", _op(g, "Add", mean, g.scalar(eps, "float32")))
    scaled = _op(g, "Mul", _op(g, "Div", wide, root), g.constant(scale.float(), hint))
    return _back(g, scaled)


def silu(g: Graph, x: Value) -> Value:
    return g.op("Mul", x, g.op("Sigmoid", x))


def heads(g: Graph, x: Value, count: int, size: int) -> Value:
    """``[n, count * size]`` to ``[n, count, size]``."""
    return g.op("Reshape", x, g.ints(0, count, size))


def rope_table(
    g: Graph, positions: Value, frequencies: torch.Tensor, magnitude: float
) -> tuple[Value, Value]:
    """cos and sin ``[n, 1, rotary_dim / 2]`` of ``positions [n]`` (int64)."""
    column = g.op("Unsqueeze", g.cast(positions, "float32"), g.ints(1, 2))
    angle = _op(g, "Mul", column, g.constant(frequencies.float(), "inverse_frequencies"))
    table = []
    for function in ("Cos", "Sin"):
        side = _op(g, function, angle)
        if magnitude != 1.0:
            side = _op(g, "Mul", side, g.scalar(magnitude, "float32"))
        table.append(_back(g, side))
    return table[0], table[1]


def rope(g: Graph, x: Value, table: tuple[Value, Value], rotary_dim: int, head_dim: int) -> Value:
    """Rotates the first ``rotary_dim`` of each head of ``x [n, heads, head_dim]``, halves apart."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    sizes = [half, half, rest] if rest else [half, half]
    first, second, *kept = split(g, x, sizes)
    cos, sin = table
    turned = (
        g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin)),
        g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin)),
    )
    return concat(g, [*turned, *kept])


def split(g: Graph, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
    """Along the last axis."""
    return g.ops("Split", [x, g.ints(*sizes)], [x.dtype] * len(sizes), axis=-1)


def concat(g: Graph, parts: Sequence[Value]) -> Value:
    """Along the last axis."""
    return g.op("Concat", *parts, axis=-1)


def rows(g: Graph, x: Value, indices: Value) -> Value:
    """Rows ``indices`` of ``x``."""
    return g.op("Gather", x, indices, axis=0)


def softmax(g: Graph, x: Value) -> Value:
    """Over the last axis, in float32: the result stays float32."""
    return _op(g, "Softmax", _float(g, x), axis=-1)


def top_k(g: Graph, x: Value, k: int) -> tuple[Value, Value]:
    """The ``k`` largest of the last axis, largest first, and their indices (int64)."""
    values, indices = g.ops("TopK", [x, g.ints(k)], [x.dtype, "int64"], axis=-1, largest=1)
    return values, indices


def argmax(g: Graph, x: Value) -> Value:
    """Index of the largest of the last axis (int64), the first of equals."""
    return g.op("ArgMax", x, dtype="int64", axis=-1, keepdims=0)


def sigmoid_router(
    g: Graph,
    x: Value,
    weight: torch.Tensor,
    bias: torch.Tensor,
    config: RouterConfig,
    hint: str,
) -> tuple[Value, Value]:
    """Weights (network's type) and experts (int64) ``[n, k]`` of rows ``x [n, H]``.

    See :class:`~tllm_wmtp.models.layers.sigmoid_router.SigmoidRouter`: the bias takes part in the
    choice only, and of ``n_group`` groups the best ``topk_group`` are considered.
    """
    matrix = g.constant(weight.float().t(), hint)
    scores = _op(g, "Sigmoid", _op(g, "MatMul", _float(g, x), matrix))
    choice = _op(g, "Add", scores, g.constant(bias.float(), f"{hint}.bias"))
    if config.topk_group < config.n_group:
        choice = _best_groups(g, choice, config)
    _, experts = top_k(g, choice, config.top_k)
    (weights,) = g.ops("GatherElements", [scores, experts], ["float32"], axis=1)
    if config.norm_topk_prob:
        total = _op(g, "ReduceSum", weights, g.ints(-1), keepdims=1)
        weights = _op(g, "Div", weights, _op(g, "Add", total, g.scalar(1e-20, "float32")))
    weights = _op(g, "Mul", weights, g.scalar(config.routed_scaling_factor, "float32"))
    return _back(g, weights), experts


def _best_groups(g: Graph, choice: Value, config: RouterConfig) -> Value:
    """``choice [n, E]`` with the experts of all but the best groups out of reach."""
    groups, size = config.n_group, config.num_experts // config.n_group
    grouped = g.op("Reshape", choice, g.ints(0, groups, size))
    best_two, _ = top_k(g, grouped, 2)
    score = _op(g, "ReduceSum", best_two, g.ints(-1), keepdims=0)
    _, kept = top_k(g, score, config.topk_group)  # [n, topk_group]
    numbers = g.constant(torch.arange(groups), f"groups_{groups}")
    (equal,) = g.ops("Equal", [g.op("Unsqueeze", kept, g.ints(2)), numbers], ["bool"])
    hits = _op(g, "ReduceMax", g.cast(equal, "float32"), g.ints(1), keepdims=0)  # [n, groups]
    (inside,) = g.ops("Greater", [hits, g.scalar(0.0, "float32")], ["bool"])
    mask = g.op("Unsqueeze", inside, g.ints(2))
    (left,) = g.ops("Where", [mask, grouped, g.scalar(-3.0e38, "float32")], ["float32"])
    return g.op("Reshape", left, g.ints(0, config.num_experts))


# Operations of the float32 islands: they are float32 in every network, so nothing rounds them.


def _float(g: Graph, x: Value) -> Value:
    if x.dtype == "float32":
        return x
    return g.cast(x, "float32")


def _op(g: Graph, kind: str, *inputs: Value, **fields: Any) -> Value:
    return g.ops(kind, inputs, ["float32"], **fields)[0]


def _back(g: Graph, x: Value) -> Value:
    """Out of a float32 island, into the network's type."""
    if g.dtype != "float32":
        return g.cast(x, g.dtype)
    return g.rounded(x)
