"""How the draft head of each family becomes graph nodes."""

from __future__ import annotations

from typing import Any

from tllm_wmtp.engine.heads import decoder, nemotron_h, qwen3_5
from tllm_wmtp.engine.heads.contract import Attention, HeadWriter
from tllm_wmtp.errors import ConfigError

__all__ = ["Attention", "HeadWriter", "head_writer"]

WRITERS: dict[str, HeadWriter] = {
    "DeepseekV3MtpHead": decoder.NEXT_N,
    "Glm4MoeMtpHead": decoder.NEXT_N,
    "MimoMtpHead": decoder.MIMO,
    "NemotronHMtpHead": nemotron_h.NEMOTRON_H,
    "Qwen3_5MtpHead": qwen3_5.QWEN3_5,
}


def head_writer(module: Any) -> HeadWriter:
    """The writer for a head module's class.

    Raises:
        ConfigError: no graph of this class is known.
    """
    name = type(module).__name__
    if name not in WRITERS:
        raise ConfigError(
            f"draft head {name}",
            f"engines are made of {', '.join(sorted(WRITERS))}",
            "run this checkpoint on the embedded runtime",
        )
    return WRITERS[name]
