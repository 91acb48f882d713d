"""The Qwen3.5 draft head: fused embedding and hidden state, one gated attention block."""

from __future__ import annotations

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value
from tllm_wmtp.engine.heads.contract import Attention, HeadWriter
from tllm_wmtp.engine.heads.decoder import write_block
from tllm_wmtp.models.qwen3_5 import AttentionBlock, Qwen3_5MtpHead


def write(
    e: Emitter, head: Qwen3_5MtpHead, embedding: Value, hidden: Value, attend: Attention
) -> Value:
    both = [
        e.emit(head.pre_fc_norm_embedding, "pre_fc_norm_embedding", embedding),
        e.emit(head.pre_fc_norm_hidden, "pre_fc_norm_hidden", hidden),
    ]
    block = head.layers[0]
    assert isinstance(block, AttentionBlock)
    x = e.emit(head.fc, "fc", ops.concat(e.g, both))
    return e.emit(head.norm, "norm", write_block(e, block, "layers.0", x, attend))


QWEN3_5 = HeadWriter(write)
