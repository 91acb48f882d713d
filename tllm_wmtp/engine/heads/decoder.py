"""Heads made of one decoder block: MiMo's, and the one that DeepSeek-V3 introduced."""

from __future__ import annotations

from typing import Any

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value
from tllm_wmtp.engine.heads.attention import write_attention
from tllm_wmtp.engine.heads.contract import Attention, HeadWriter, answered
from tllm_wmtp.models.decoder import NextNHead
from tllm_wmtp.models.mimo import MimoMtpHead


def write_block(e: Emitter, block: Any, path: str, x: Value, attend: Attention) -> Value:
    """``x [n, H]`` through attention and feed-forward, each behind a norm and a residual: the
    answered rows ``[b, H]``."""
    normed = e.emit(block.input_layernorm, f"{path}.input_layernorm", x)
    mixed = write_attention(block.self_attn, e, f"{path}.self_attn", normed, attend)
    x = e.g.op("Add", answered(e.g, x, attend), mixed)
    normed = e.emit(block.post_attention_layernorm, f"{path}.post_attention_layernorm", x)
    return e.g.op("Add", x, e.emit(block.mlp, f"{path}.mlp", normed))


def _write_next_n(
    e: Emitter, head: NextNHead, embedding: Value, hidden: Value, attend: Attention
) -> Value:
    both = [e.emit(head.enorm, "enorm", embedding), e.emit(head.hnorm, "hnorm", hidden)]
    x = e.emit(head.eh_proj, "eh_proj", ops.concat(e.g, both))
    x = write_block(e, head.block, "block", x, attend)
    return e.emit(head.shared_head.norm, "shared_head.norm", x)


def _write_mimo(
    e: Emitter, head: MimoMtpHead, embedding: Value, hidden: Value, attend: Attention
) -> Value:
    both = [
        e.emit(head.hidden_layernorm, "hidden_layernorm", hidden),
        e.emit(head.token_layernorm, "token_layernorm", embedding),
    ]
    x = e.emit(head.input_proj, "input_proj", ops.concat(e.g, both))
    x = write_block(e, head.block, "block", x, attend)
    return e.emit(head.final_layernorm, "final_layernorm", x)


NEXT_N = HeadWriter(_write_next_n, embedding="embed_tokens", projection="shared_head.head")
MIMO = HeadWriter(_write_mimo)
