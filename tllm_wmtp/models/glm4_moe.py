"""GLM-4.5 and 4.6: grouped-query attention, experts under a sigmoid router, and the MTP head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tllm_wmtp.models.decoder import DecoderConfig, DecoderTarget, NextNHead, check_heads
from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.decoder_block import DecoderBlock
from tllm_wmtp.models.layers.gated_sigmoid_moe import GatedSigmoidMoe, SigmoidMoeConfig
from tllm_wmtp.models.layers.moe import GatedMLP
from tllm_wmtp.models.layers.plain_attention import PlainAttention
from tllm_wmtp.models.layers.rope import Rope, RopeConfig
from tllm_wmtp.models.spec import CacheSpec, KeyValueShape


@dataclass(frozen=True)
class Glm4MoeConfig(DecoderConfig):
    """The fields of a Hugging Face ``config.json`` that the computation depends on.

    The first ``first_k_dense_replace`` layers have one MLP instead of experts.
    """

    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    use_qk_norm: bool
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
        attention = KeyValueShape(self.num_key_value_heads, self.head_dim, self.head_dim**-0.5)
        return CacheSpec(tuple(range(self.num_hidden_layers)), attention, draft=attention)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Glm4MoeConfig:
        """Reads a parsed ``config.json``.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        text = Fields(config)
        common = DecoderConfig.common(text, attention_bias=False)
        heads = common["num_attention_heads"]
        kv_heads = text.whole("num_key_value_heads", heads)
        head_dim = text.whole("head_dim", common["hidden_size"] // heads)
        check_heads(text, heads, kv_heads, head_dim)
        return cls(
            **common,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rope=RopeConfig.from_hf(text, head_dim, default_share=0.5),
            use_qk_norm=bool(text.get("use_qk_norm", False)),
            first_k_dense_replace=text.whole("first_k_dense_replace", 1, least=0),
            moe=SigmoidMoeConfig.from_hf(text),
        )


def _block(config: Glm4MoeConfig, rope: Rope, layer: int) -> DecoderBlock:
    attention = PlainAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        rope,
        config.attention_bias,
        config.rms_norm_eps if config.use_qk_norm else None,
    )
    feed_forward: nn.Module
    if layer < config.first_k_dense_replace:
        feed_forward = GatedMLP(config.hidden_size, config.intermediate_size)
    else:
        feed_forward = GatedSigmoidMoe(config.hidden_size, config.moe)
    return DecoderBlock(config.hidden_size, config.rms_norm_eps, attention, feed_forward)


class Glm4MoeTarget(DecoderTarget):
    """The text model."""

    config: Glm4MoeConfig

    def __init__(self, config: Glm4MoeConfig):
        rope = Rope(config.rope)
        super().__init__(config, rope, lambda index: _block(config, rope, index))
        self.config = config


class Glm4MoeMtpHead(NextNHead):
    """The built-in draft head, called as one more layer after the target's."""

    def __init__(self, config: Glm4MoeConfig, rope: Rope):
        super().__init__(config, _block(config, rope, config.num_hidden_layers))
