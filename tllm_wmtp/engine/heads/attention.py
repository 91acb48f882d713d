"""Attention layers of draft heads: keys and values of all rows, queries of the answered ones."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import nn

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value
from tllm_wmtp.engine.heads.contract import Attention, answered
from tllm_wmtp.models.layers.attention import GatedAttention
from tllm_wmtp.models.layers.mla import LatentAttention
from tllm_wmtp.models.layers.plain_attention import PlainAttention
from tllm_wmtp.models.layers.rope import Rope
from tllm_wmtp.models.nemotron_h import Attention as BareAttention


@singledispatch
def write_attention(layer: nn.Module, e: Emitter, path: str, x: Value, attend: Attention) -> Value:
    """Attention output ``[b, H]`` of normed rows ``x [n, H]``."""
    raise NotImplementedError(f"no graph for {type(layer).__name__} ({path})")


class _Rotation:
    """The rotary tables of all rows and of the answered ones."""

    def __init__(self, e: Emitter, rope: Rope, attend: Attention):
        self.g, config = e.g, rope.config
        self.size, frequencies = config.rotary_dim, config.inverse_frequencies()
        magnitude = config.magnitude()
        self._all = ops.rope_table(e.g, attend.positions, frequencies, magnitude)
        self._answered = self._all
        if attend.rows is not None:
            self._answered = ops.rope_table(e.g, attend.row_positions, frequencies, magnitude)

    def of_all(self, x: Value, head_dim: int) -> Value:
        return ops.rope(self.g, x, self._all, self.size, head_dim)

    def of_answered(self, x: Value, head_dim: int) -> Value:
        return ops.rope(self.g, x, self._answered, self.size, head_dim)


def _project(e: Emitter, layer: nn.Module, path: str, x: Value, count: int, size: int) -> Value:
    """``[n, count, size]``: a projection split into heads."""
    return ops.heads(e.g, e.emit(layer, path, x), count, size)


def _output(e: Emitter, layer: nn.Module, path: str, x: Value, width: int) -> Value:
    return e.emit(layer, path, e.g.op("Reshape", x, e.g.ints(0, width)))


@write_attention.register
def _(layer: GatedAttention, e: Emitter, path: str, x: Value, attend: Attention) -> Value:
    g, heads, size = e.g, layer.num_heads, layer.head_dim
    turn = _Rotation(e, layer._rope[0], attend)
    k = _project(e, layer.k_proj, f"{path}.k_proj", x, layer.num_kv_heads, size)
    v = _project(e, layer.v_proj, f"{path}.v_proj", x, layer.num_kv_heads, size)
    k = turn.of_all(e.emit(layer.k_norm, f"{path}.k_norm", k), size)
    asked = answered(g, x, attend)
    both = _project(e, layer.q_proj, f"{path}.q_proj", asked, heads, 2 * size)
    q, gate = ops.split(g, both, [size, size])
    q = turn.of_answered(e.emit(layer.q_norm, f"{path}.q_norm", q), size)
    out = g.op("Mul", attend(q, k, v), g.op("Sigmoid", gate))
    return _output(e, layer.o_proj, f"{path}.o_proj", out, heads * size)


@write_attention.register
def _(layer: PlainAttention, e: Emitter, path: str, x: Value, attend: Attention) -> Value:
    heads, size = layer.num_heads, layer.head_dim
    turn = _Rotation(e, layer._rope[0], attend)
    k = _project(e, layer.k_proj, f"{path}.k_proj", x, layer.num_kv_heads, size)
    v = _project(e, layer.v_proj, f"{path}.v_proj", x, layer.num_kv_heads, size)
    k = turn.of_all(e.emit(layer.k_norm, f"{path}.k_norm", k), size)
    asked = answered(e.g, x, attend)
    q = _project(e, layer.q_proj, f"{path}.q_proj", asked, heads, size)
    q = turn.of_answered(e.emit(layer.q_norm, f"{path}.q_norm", q), size)
    return _output(e, layer.o_proj, f"{path}.o_proj", attend(q, k, v), heads * size)


@write_attention.register
def _(layer: BareAttention, e: Emitter, path: str, x: Value, attend: Attention) -> Value:
    heads, size = layer.num_heads, layer.head_dim
    k = _project(e, layer.k_proj, f"{path}.k_proj", x, layer.num_kv_heads, size)
    v = _project(e, layer.v_proj, f"{path}.v_proj", x, layer.num_kv_heads, size)
    asked = answered(e.g, x, attend)
    q = _project(e, layer.q_proj, f"{path}.q_proj", asked, heads, size)
    return _output(e, layer.o_proj, f"{path}.o_proj", attend(q, k, v), heads * size)


@write_attention.register
def _(layer: LatentAttention, e: Emitter, path: str, x: Value, attend: Attention) -> Value:
    """In the absorbed form of :mod:`tllm_wmtp.models.layers.mla`: one KV head of R + P."""
    g, config = e.g, layer.config
    rank, rope_dim, nope_dim = config.kv_lora_rank, config.rope_dim, config.nope_dim
    turn = _Rotation(e, layer._rope[0], attend)
    down = e.emit(layer.kv_a_proj_with_mqa, f"{path}.kv_a_proj_with_mqa", x)
    latent, k_pe = ops.split(g, down, [rank, rope_dim])
    latent = e.emit(layer.kv_a_layernorm, f"{path}.kv_a_layernorm", latent)
    k_pe = _halves(e, layer, ops.heads(g, k_pe, 1, rope_dim), 1)
    cached = ops.concat(g, [ops.heads(g, latent, 1, rank), turn.of_all(k_pe, rope_dim)])

    both = _queries(e, layer, path, answered(g, x, attend))
    q_nope, q_pe = ops.split(g, both, [nope_dim, rope_dim])
    up = e.weights.tensor(f"{path}.kv_b_proj.weight").unflatten(0, (config.num_heads, -1))
    w_uk, w_uv = up.split((nope_dim, config.value_dim), dim=1)  # [heads, Dn or Dv, R]
    absorbed = _per_head(e, q_nope, w_uk, f"{path}.w_uk")
    q_pe = turn.of_answered(_halves(e, layer, q_pe, config.num_heads), rope_dim)
    weighted = attend(ops.concat(g, [absorbed, q_pe]), cached, cached)
    latent, _ = ops.split(g, weighted, [rank, rope_dim])
    out = _per_head(e, latent, w_uv.transpose(1, 2), f"{path}.w_uv")
    return _output(e, layer.o_proj, f"{path}.o_proj", out, config.num_heads * config.value_dim)


def _queries(e: Emitter, layer: LatentAttention, path: str, x: Value) -> Value:
    config = layer.config
    if config.q_lora_rank is None:
        last, name = layer.q_proj, "q_proj"
    else:
        x = e.emit(layer.q_a_proj, f"{path}.q_a_proj", x)
        x = e.emit(layer.q_a_layernorm, f"{path}.q_a_layernorm", x)
        last, name = layer.q_b_proj, "q_b_proj"
    size = config.nope_dim + config.rope_dim
    return _project(e, last, f"{path}.{name}", x, config.num_heads, size)


def _halves(e: Emitter, layer: LatentAttention, x: Value, heads: int) -> Value:
    """``x [n, heads, P]`` with the pairs of the rotation halves apart."""
    if not layer.config.interleaved:
        return x
    g, size = e.g, layer.config.rope_dim
    pairs = g.op("Reshape", x, g.ints(0, heads, size // 2, 2))
    return g.op("Reshape", g.op("Transpose", pairs, perm=[0, 1, 3, 2]), g.ints(0, heads, size))


def _per_head(e: Emitter, x: Value, weight: torch.Tensor, hint: str) -> Value:
    """``x [n, heads, a]`` times ``weight [heads, a, c]``, head by head: ``[n, heads, c]``."""
    by_head = e.g.op("Transpose", x, perm=[1, 0, 2])
    return e.g.op("Transpose", e.g.op("MatMul", by_head, e.g.weight(weight, hint)), perm=[1, 0, 2])
