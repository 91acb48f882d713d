"""Qwen3.5 / 3.6 text models, dense and MoE, and their built-in MTP head.

The target is a stack of Gated DeltaNet and gated full-attention layers; the MTP head is one more
full-attention block fed by ``fc([norm_e(embedding of token p+1), norm_h(hidden of position p)])``.
Row p of the head predicts token p+2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.attention import Attend, GatedAttention
from tllm_wmtp.models.layers.gated_delta import DeltaStates, GatedDeltaNet
from tllm_wmtp.models.layers.moe import GatedMLP, SparseMoe
from tllm_wmtp.models.layers.norm import RMSNorm
from tllm_wmtp.models.layers.rope import Rope, RopeConfig
from tllm_wmtp.models.spec import (
    CacheSpec,
    DraftHead,
    KeyValueShape,
    RecurrentShape,
    Target,
    TargetStates,
)

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Qwen3_5Config:
    """The fields of a Hugging Face ``config.json`` that the computation depends on."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int
    eos_token_ids: tuple[int, ...]
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def caches(self) -> CacheSpec:
        keys, values = (
            self.linear_num_key_heads * self.linear_key_head_dim,
            self.linear_num_value_heads * self.linear_value_head_dim,
        )
        attention = KeyValueShape(self.num_key_value_heads, self.head_dim, self.head_dim**-0.5)
        return CacheSpec(
            attention_layers=tuple(i for i, t in enumerate(self.layer_types) if t == FULL),
            attention=attention,
            draft=attention,
            recurrent_layers=tuple(i for i, t in enumerate(self.layer_types) if t == LINEAR),
            recurrent=RecurrentShape(
                conv_kernel=self.linear_conv_kernel_dim,
                conv_channels=2 * keys + values,
                key_heads=self.linear_num_key_heads,
                key_dim=self.linear_key_head_dim,
                value_heads=self.linear_num_value_heads,
                value_dim=self.linear_value_head_dim,
            ),
        )

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Qwen3_5Config:
        """Reads a parsed ``config.json``, text-only or multimodal (``text_config``).

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        outer = Fields(config)
        inner = outer.get("text_config")
        text = Fields(inner, "text_config") if inner else outer
        heads, hidden = text.whole("num_attention_heads"), text.whole("hidden_size")
        head_dim = text.whole("head_dim", hidden // heads)
        experts = text.whole("num_experts", 0, least=0)
        layer_types = _layer_types(text)
        read = cls(
            vocab_size=text.whole("vocab_size"),
            hidden_size=hidden,
            layer_types=layer_types,
            num_attention_heads=heads,
            num_key_value_heads=text.whole("num_key_value_heads"),
            head_dim=head_dim,
            linear_num_key_heads=text.whole("linear_num_key_heads"),
            linear_num_value_heads=text.whole("linear_num_value_heads"),
            linear_key_head_dim=text.whole("linear_key_head_dim"),
            linear_value_head_dim=text.whole("linear_value_head_dim"),
            linear_conv_kernel_dim=text.whole("linear_conv_kernel_dim"),
            rms_norm_eps=text.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(text, head_dim),
            attention_bias=bool(text.get("attention_bias", False)),
            max_position_embeddings=text.whole("max_position_embeddings", least=2),
            tie_word_embeddings=bool(
                text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))
            ),
            mtp_num_hidden_layers=text.whole(
                "mtp_num_hidden_layers", outer.whole("mtp_num_hidden_layers", 1, least=0), least=0
            ),
            eos_token_ids=text.token_ids("eos_token_id") or outer.token_ids("eos_token_id"),
            intermediate_size=0 if experts else text.whole("intermediate_size"),
            num_experts=experts,
            num_experts_per_tok=text.whole("num_experts_per_tok") if experts else 0,
            moe_intermediate_size=text.whole("moe_intermediate_size") if experts else 0,
            shared_expert_intermediate_size=(
                text.whole("shared_expert_intermediate_size") if experts else 0
            ),
        )
        read._check_fit(text)
        return read

    def _check_fit(self, text: Fields) -> None:
        """What the modules and kernels take for granted."""
        if self.num_attention_heads % self.num_key_value_heads:
            text.refuse(
                "num_key_value_heads",
                f"it must divide num_attention_heads {self.num_attention_heads}",
            )
        if self.head_dim % 8:
            text.refuse("head_dim", f"heads of {self.head_dim}: it must be a multiple of 8")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            text.refuse(
                "linear_num_key_heads",
                f"it must divide linear_num_value_heads {self.linear_num_value_heads}",
            )
        if self.linear_value_head_dim % 16:
            text.refuse("linear_value_head_dim", "it must be a multiple of 16")
        if self.num_experts_per_tok > self.num_experts:
            text.refuse(
                "num_experts_per_tok", f"there are {self.num_experts} experts to choose from"
            )


def _layer_types(text: Fields) -> tuple[str, ...]:
    layers, types = text.whole("num_hidden_layers"), text.get("layer_types")
    if types is None:
        interval = text.whole("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    rule = f"{layers} layers of {LINEAR!r} or {FULL!r} are expected"
    if not isinstance(types, list) or len(types) != layers:
        text.refuse("layer_types", rule)
    if any(kind not in (FULL, LINEAR) for kind in types):
        text.refuse("layer_types", rule)
    return tuple(types)


def _feed_forward(config: Qwen3_5Config) -> nn.Module:
    if not config.num_experts:
        return GatedMLP(config.hidden_size, config.intermediate_size)
    return SparseMoe(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
    )


class AttentionBlock(nn.Module):
    """Full attention and feed-forward, each behind a norm and a residual."""

    def __init__(self, config: Qwen3_5Config, rope: Rope):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GatedAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
            rope,
            config.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _feed_forward(config)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixed = self.self_attn(self.input_layernorm(x), positions, attend, rows)
        x = (x if rows is None else x.index_select(-2, rows)) + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class RecurrentBlock(nn.Module):
    """Gated DeltaNet and feed-forward, each behind a norm and a residual."""

    def __init__(self, config: Qwen3_5Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(
            config.hidden_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            config.rms_norm_eps,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _feed_forward(config)

    def forward(self, x: torch.Tensor, states: DeltaStates) -> torch.Tensor:
        x = x + self.linear_attn(self.input_layernorm(x), states)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3_5Target(Target):
    """The text model."""

    config: Qwen3_5Config

    def __init__(self, config: Qwen3_5Config):
        super().__init__()
        self.config = config
        self.rope = Rope(config.rope)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            AttentionBlock(config, self.rope) if kind == FULL else RecurrentBlock(config)
            for kind in config.layer_types
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def prunable(self) -> bool:
        return self.config.layer_types[-1] == FULL

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: TargetStates,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed_tokens(ids)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentBlock):
                x = layer(x, states.recurrent(index))
            else:
                x = layer(x, positions, states.attention(index), rows if index == last else None)
        if rows is not None and not self.prunable:
            x = x.index_select(1, rows)
        return self.norm(x)


class Qwen3_5MtpHead(DraftHead):
    """The built-in draft head. It shares the target's embedding and lm_head."""

    def __init__(self, config: Qwen3_5Config, rope: Rope):
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([AttentionBlock(config, rope)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Block input ``[..., H]`` of the embeddings of tokens p+1 and the hidden states of p."""
        return self.fc(
            torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), -1)
        )

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.fuse(embedding, hidden)
        return self.norm(self.layers[0](x, positions, attend, rows))

    def store(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block = self.layers[0]
        assert isinstance(block, AttentionBlock)
        x = block.input_layernorm(self.fuse(embedding, hidden))
        return block.self_attn.keys_values(x, block.self_attn._rope[0].table(positions, x.dtype))
