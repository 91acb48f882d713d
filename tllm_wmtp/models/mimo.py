"""MiMo: a dense decoder with Qwen2's block, and its built-in MTP head (arXiv 2505.07608).

Unlike the other families, the target hands over the output of its last block, before its final
norm; that norm belongs to the target's own logits. The head feeds back its own normed output. (As
in the model authors' implementation for vLLM; SGLang hands over the normed state.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tllm_wmtp.models.decoder import DecoderConfig, DecoderTarget, check_heads
from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.layers.decoder_block import DecoderBlock
from tllm_wmtp.models.layers.moe import GatedMLP
from tllm_wmtp.models.layers.plain_attention import PlainAttention
from tllm_wmtp.models.layers.rope import Rope, RopeConfig
from tllm_wmtp.models.spec import CacheSpec, DraftHead, KeyValueShape, Target, TargetStates


@dataclass(frozen=True)
class MimoConfig(DecoderConfig):
    """The fields of a Hugging Face ``config.json`` that the computation depends on."""

    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    num_experts: int = 0
    num_experts_per_tok: int = 0

    @property
    def caches(self) -> CacheSpec:
        attention = KeyValueShape(self.num_key_value_heads, self.head_dim, self.head_dim**-0.5)
        return CacheSpec(tuple(range(self.num_hidden_layers)), attention, draft=attention)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> MimoConfig:
        """Reads a parsed ``config.json``.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        text = Fields(config)
        common = DecoderConfig.common(text, attention_bias=True)
        heads, hidden = common["num_attention_heads"], common["hidden_size"]
        kv_heads = text.whole("num_key_value_heads", heads)
        head_dim = text.whole("head_dim", hidden // heads)
        check_heads(text, heads, kv_heads, head_dim)
        if text.get("use_sliding_window"):
            text.refuse("use_sliding_window", "every layer must have full attention")
        rope = RopeConfig.from_hf(text, head_dim, default_share=1.0)
        return cls(**common, num_key_value_heads=kv_heads, head_dim=head_dim, rope=rope)


def _block(config: MimoConfig, rope: Rope) -> DecoderBlock:
    attention = PlainAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        rope,
        config.attention_bias,
    )
    feed_forward = GatedMLP(config.hidden_size, config.intermediate_size)
    return DecoderBlock(config.hidden_size, config.rms_norm_eps, attention, feed_forward)


class MimoTarget(DecoderTarget):
    """The text model; its hidden states are those before the final norm."""

    config: MimoConfig

    def __init__(self, config: MimoConfig):
        rope = Rope(config.rope)
        super().__init__(config, rope, lambda index: _block(config, rope))
        self.config = config

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: TargetStates,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.run_blocks(ids, positions, states, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


class MimoMtpHead(DraftHead):
    """``block(input_proj([norm_h(hidden of row p), norm_e(embedding of token p+1)]))``, normed.

    Here the hidden state comes first. Embedding and lm_head are the target's.
    """

    def __init__(self, config: MimoConfig, rope: Rope):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_layernorm = nn.RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = _block(config, rope)
        self.final_layernorm = nn.RMSNorm(hidden, eps)

    @staticmethod
    def name_of(config: MimoConfig, name: str) -> str | None:
        """Our name of ``model.mtp_layers.0.*``."""
        match = re.match(r"^model\.mtp_layers\.(\d+)\.(.+)$", name)
        if match is None:
            return None
        if match[1] != "0":
            return f"{match[1]}.{match[2]}"  # another head, which check_one_head refuses
        own = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")
        return match[2] if match[2].startswith(own) else f"block.{match[2]}"

    def fuse(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Block input ``[..., H]``."""
        return self.input_proj(
            torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedding)), -1)
        )

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.block(self.fuse(embedding, hidden), positions, attend, rows)
        return self.final_layernorm(x)

    def store(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block.store(self.fuse(embedding, hidden), positions)

    def logits(self, target: Target, output: torch.Tensor) -> torch.Tensor:
        return target.lm_head(output)
