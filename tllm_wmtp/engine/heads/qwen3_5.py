"""The Qwen3.5 draft head: fused embedding and hidden state, one gated attention block."""

from __future__ import annotations

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value
from tllm_wmtp.engine.heads import Attention
from tllm_wmtp.models.layers.attention import GatedAttention
from tllm_wmtp.models.qwen3_5 import AttentionBlock, Qwen3_5MtpHead


def write(
    e: Emitter, head: Qwen3_5MtpHead, embedding: Value, hidden: Value, attend: Attention
) -> Value:
    fused = ops.concat(
        e.g,
        [
            e.emit(head.pre_fc_norm_embedding, "pre_fc_norm_embedding", embedding),
            e.emit(head.pre_fc_norm_hidden, "pre_fc_norm_hidden", hidden),
        ],
    )
    block = head.layers[0]
    assert isinstance(block, AttentionBlock)
    x = write_block(e, block, "layers.0", e.emit(head.fc, "fc", fused), attend)
    return e.emit(head.norm, "norm", x)


def write_block(e: Emitter, block: AttentionBlock, path: str, x: Value, attend: Attention) -> Value:
    normed = e.emit(block.input_layernorm, f"{path}.input_layernorm", x)
    mixed = _attention(e, block.self_attn, f"{path}.self_attn", normed, attend)
    x = e.g.op("Add", ops.rows(e.g, x, attend.rows), mixed)
    normed = e.emit(block.post_attention_layernorm, f"{path}.post_attention_layernorm", x)
    return e.g.op("Add", x, e.emit(block.mlp, f"{path}.mlp", normed))


def _attention(e: Emitter, layer: GatedAttention, path: str, x: Value, attend: Attention) -> Value:
    """Keys and values of all rows ``x [n, H]``; queries, gate and output of the answered ones."""
    g, size = e.g, layer.head_dim
    rotary = layer._rope[0].config
    frequencies, magnitude = rotary.inverse_frequencies(), rotary.magnitude()
    k = ops.heads(g, e.emit(layer.k_proj, f"{path}.k_proj", x), layer.num_kv_heads, size)
    v = ops.heads(g, e.emit(layer.v_proj, f"{path}.v_proj", x), layer.num_kv_heads, size)
    k = e.emit(layer.k_norm, f"{path}.k_norm", k)
    table = ops.rope_table(g, attend.positions, frequencies, magnitude)
    k = ops.rope(g, k, table, rotary.rotary_dim, size)

    answered = ops.rows(g, x, attend.rows)
    both = e.emit(layer.q_proj, f"{path}.q_proj", answered)
    q, gate = ops.split(g, ops.heads(g, both, layer.num_heads, 2 * size), [size, size])
    q = e.emit(layer.q_norm, f"{path}.q_norm", q)
    table = ops.rope_table(g, attend.row_positions, frequencies, magnitude)
    q = ops.rope(g, q, table, rotary.rotary_dim, size)

    out = g.op("Mul", attend(q, k, v), g.op("Sigmoid", gate))
    out = g.op("Reshape", out, g.ints(0, layer.num_heads * size))
    return e.emit(layer.o_proj, f"{path}.o_proj", out)
