"""DeepSeek-V3 and R1: latent attention, experts under a sigmoid router, and the MTP head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tllm_wmtp.models.decoder import DecoderConfig, DecoderTarget, NextNHead
from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.decoder_block import DecoderBlock
from tllm_wmtp.models.layers.gated_sigmoid_moe import GatedSigmoidMoe, SigmoidMoeConfig
from tllm_wmtp.models.layers.mla import LatentAttention, LatentConfig
from tllm_wmtp.models.layers.moe import GatedMLP
from tllm_wmtp.models.layers.rope import Rope, RopeConfig
from tllm_wmtp.models.spec import CacheSpec, KeyValueShape


@dataclass(frozen=True)
class DeepseekV3Config(DecoderConfig):
    """The fields of a Hugging Face ``config.json`` that the computation depends on.

    The first ``first_k_dense_replace`` layers have one MLP instead of experts.
    """

    latent: LatentConfig
    rope: RopeConfig
    first_k_dense_replace: int
    moe: SigmoidMoeConfig

    @property
    def num_experts(self) -> int:
        return self.moe.router.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.router.top_k

    @property
    def caches(self) -> CacheSpec:
        query_dim = self.latent.nope_dim + self.latent.rope_dim
        scale = query_dim**-0.5 * self.rope.score_factor()
        attention = KeyValueShape(1, self.latent.cached_dim, scale)
        return CacheSpec(tuple(range(self.num_hidden_layers)), attention, draft=attention)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DeepseekV3Config:
        """Reads a parsed ``config.json``.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        text = Fields(config)
        common = DecoderConfig.common(text, attention_bias=False)
        if text.get("moe_layer_freq", 1) != 1:
            text.refuse("moe_layer_freq", "every layer after the dense ones must have experts")
        rope_dim = text.whole("qk_rope_head_dim")
        latent = LatentConfig(
            num_heads=common["num_attention_heads"],
            q_lora_rank=text.whole("q_lora_rank") if text.get("q_lora_rank") is not None else None,
            kv_lora_rank=text.whole("kv_lora_rank"),
            nope_dim=text.whole("qk_nope_head_dim"),
            rope_dim=rope_dim,
            value_dim=text.whole("v_head_dim"),
            interleaved=bool(text.get("rope_interleave", True)),
            bias=common["attention_bias"],
        )
        if latent.cached_dim % 8:
            text.refuse(
                "kv_lora_rank", f"with qk_rope_head_dim {rope_dim} it must be a multiple of 8"
            )
        return cls(
            **common,
            latent=latent,
            rope=RopeConfig.from_hf(text, rope_dim, default_share=1.0),
            first_k_dense_replace=text.whole("first_k_dense_replace", 3, least=0),
            moe=SigmoidMoeConfig.from_hf(text),
        )


def _block(config: DeepseekV3Config, rope: Rope, layer: int) -> DecoderBlock:
    attention = LatentAttention(config.hidden_size, config.latent, rope)
    feed_forward: nn.Module
    if layer < config.first_k_dense_replace:
        feed_forward = GatedMLP(config.hidden_size, config.intermediate_size)
    else:
        feed_forward = GatedSigmoidMoe(config.hidden_size, config.moe)
    return DecoderBlock(config.hidden_size, config.rms_norm_eps, attention, feed_forward)


class DeepseekV3Target(DecoderTarget):
    """The text model."""

    config: DeepseekV3Config

    def __init__(self, config: DeepseekV3Config):
        rope = Rope(config.rope)
        super().__init__(config, rope, lambda index: _block(config, rope, index))
        self.config = config


class DeepseekV3MtpHead(NextNHead):
    """The built-in draft head, called as one more layer after the target's."""

    def __init__(self, config: DeepseekV3Config, rope: Rope):
        super().__init__(config, _block(config, rope, config.num_hidden_layers))
