"""The Nemotron-H draft head: an attention layer, then layers that see one row each."""

from __future__ import annotations

from typing import Any

from tllm_wmtp.engine import ops
from tllm_wmtp.engine.emit import Emitter
from tllm_wmtp.engine.graph import Value
from tllm_wmtp.engine.heads.attention import write_attention
from tllm_wmtp.engine.heads.contract import Attention, HeadWriter, answered
from tllm_wmtp.models.nemotron_h import NemotronHMtpHead


def write(
    e: Emitter, head: NemotronHMtpHead, embedding: Value, hidden: Value, attend: Attention
) -> Value:
    g, layers = e.g, list[Any](head.layers)
    first, last = layers[0], layers[-1]
    both = [
        e.emit(first.enorm, "layers.0.enorm", embedding),
        e.emit(first.hnorm, "layers.0.hnorm", hidden),
    ]
    x = e.emit(first.eh_proj, "layers.0.eh_proj", ops.concat(g, both))
    normed = e.emit(first.norm, "layers.0.norm", x)
    mixed = write_attention(first.mixer, e, "layers.0.mixer", normed, attend)
    x = g.op("Add", answered(g, x, attend), mixed)
    for index, layer in enumerate(layers[1:], start=1):
        normed = e.emit(layer.norm, f"layers.{index}.norm", x)
        x = g.op("Add", x, e.emit(layer.mixer, f"layers.{index}.mixer", normed))
    return e.emit(last.final_layernorm, f"layers.{len(layers) - 1}.final_layernorm", x)


NEMOTRON_H = HeadWriter(write)
