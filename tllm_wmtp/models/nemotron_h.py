"""Nemotron-H / Nemotron-3 hybrids and their built-in MTP head.

The target is a stack of one-mixer layers, each behind a norm and a residual: Mamba2, full attention
without position embedding, MoE or MLP of squared ReLU. The MTP head is one attention layer and
row-wise ones ("*E"), fed by ``eh_proj([enorm(embedding of token p+1), hnorm(hidden of position
p)])``. Row p of the head predicts token p+2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.layers.mamba2 import DecayStates, Mamba2
from tllm_wmtp.models.layers.relu2_moe import Relu2MLP, Relu2Moe
from tllm_wmtp.models.layers.sigmoid_router import RouterConfig
from tllm_wmtp.models.spec import (
    DECAYED_SUM,
    CacheSpec,
    DraftHead,
    KeyValueShape,
    RecurrentShape,
    Target,
    TargetStates,
)

MAMBA, ATTENTION, MOE, MLP = "mamba", "attention", "moe", "mlp"
_LETTERS = {"M": MAMBA, "*": ATTENTION, "E": MOE, "-": MLP}
_NAMES = {kind: kind for kind in _LETTERS.values()} | {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
}


@dataclass(frozen=True)
class NemotronHConfig:
    """The fields of a Hugging Face ``config.json`` that the computation depends on."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    use_conv_bias: bool
    time_step_limit: tuple[float, float]
    layer_norm_epsilon: float
    attention_bias: bool
    mlp_bias: bool
    use_bias: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int
    mtp_layer_types: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    intermediate_size: int = 0
    router: RouterConfig | None = None
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_experts(self) -> int:
        return self.router.num_experts if self.router else 0

    @property
    def num_experts_per_tok(self) -> int:
        return self.router.top_k if self.router else 0

    @property
    def caches(self) -> CacheSpec:
        attention = KeyValueShape(self.num_key_value_heads, self.head_dim, self.head_dim**-0.5)
        inner, keys = (
            self.mamba_num_heads * self.mamba_head_dim,
            self.n_groups * self.ssm_state_size,
        )
        return CacheSpec(
            attention_layers=self._layers_of(ATTENTION),
            attention=attention,
            draft=attention,
            recurrent_layers=self._layers_of(MAMBA),
            recurrent=RecurrentShape(
                conv_kernel=self.conv_kernel,
                conv_channels=inner + 2 * keys,
                key_heads=self.n_groups,
                key_dim=self.ssm_state_size,
                value_heads=self.mamba_num_heads,
                value_dim=self.mamba_head_dim,
                rule=DECAYED_SUM,
            ),
        )

    def _layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, each in enumerate(self.layer_types) if each == kind)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> NemotronHConfig:
        """Reads a parsed ``config.json``, with a pattern string or a list of layer types.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        text = Fields(config)
        layers = _layer_types(text, "layers_block_type", "hybrid_override_pattern")
        drafts = text.whole("num_nextn_predict_layers", 0, least=0)
        draft_layers: tuple[str, ...] = (ATTENTION, MOE)
        if text.get("mtp_layers_block_type") or text.get("mtp_hybrid_override_pattern"):
            draft_layers = _layer_types(
                text, "mtp_layers_block_type", "mtp_hybrid_override_pattern"
            )
        every = layers + (draft_layers if drafts else ())
        heads, hidden = text.whole("num_attention_heads"), text.whole("hidden_size")
        moe = MOE in every
        latent = text.get("moe_latent_size")
        read = cls(
            vocab_size=text.whole("vocab_size"),
            hidden_size=hidden,
            layer_types=layers,
            num_attention_heads=heads,
            num_key_value_heads=text.whole("num_key_value_heads", heads),
            head_dim=text.whole("head_dim", hidden // heads),
            mamba_num_heads=text.whole("mamba_num_heads"),
            mamba_head_dim=text.whole("mamba_head_dim"),
            n_groups=text.whole("n_groups"),
            ssm_state_size=text.whole("ssm_state_size"),
            conv_kernel=text.whole("conv_kernel", least=2),
            use_conv_bias=bool(text.get("use_conv_bias", True)),
            time_step_limit=_time_step_limit(text),
            layer_norm_epsilon=text.number("layer_norm_epsilon", 1e-5),
            attention_bias=bool(text.get("attention_bias", False)),
            mlp_bias=bool(text.get("mlp_bias", False)),
            use_bias=bool(text.get("use_bias", False)),
            max_position_embeddings=text.whole("max_position_embeddings", least=2),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
            mtp_num_hidden_layers=drafts,
            mtp_layer_types=draft_layers,
            eos_token_ids=text.token_ids("eos_token_id"),
            intermediate_size=text.whole("intermediate_size") if MLP in every else 0,
            router=RouterConfig.from_hf(text) if moe else None,
            moe_intermediate_size=text.whole("moe_intermediate_size") if moe else 0,
            moe_shared_expert_intermediate_size=(
                text.whole("moe_shared_expert_intermediate_size") if moe else 0
            ),
            moe_latent_size=None if latent is None else text.whole("moe_latent_size"),
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
        if self.mamba_num_heads % self.n_groups:
            text.refuse("n_groups", f"it must divide mamba_num_heads {self.mamba_num_heads}")
        if self.mtp_num_hidden_layers:
            first, *rest = self.mtp_layer_types
            if first != ATTENTION or not all(kind in (MOE, MLP) for kind in rest):
                text.refuse(
                    "mtp_hybrid_override_pattern",
                    f"layers {', '.join(self.mtp_layer_types)}: the MTP head must be one attention "
                    "layer and then MoE or MLP layers",
                )
        for field, value in (("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
            if text.get(field, value) != value:
                text.refuse(field, f"only {value!r} is supported")
        for field in ("mtp_use_rope", "mtp_bottleneck_hidden_size"):
            if text.get(field):
                text.refuse(field, "an MTP head of this kind is not supported")


def _layer_types(text: Fields, names: str, pattern: str) -> tuple[str, ...]:
    """Kinds of layers from the list ``names`` or the string ``pattern``, one letter per layer."""
    listed = text.get(names, text.get("layer_types") if names == "layers_block_type" else None)
    if listed is not None:
        if not isinstance(listed, list) or not listed or any(k not in _NAMES for k in listed):
            text.refuse(names, f"it must be a list of {', '.join(_LETTERS.values())}")
        return tuple(_NAMES[kind] for kind in listed)
    letters = text.need(pattern)
    if not isinstance(letters, str) or not letters or any(c not in _LETTERS for c in letters):
        text.refuse(pattern, f"it must be a string of the letters {' '.join(_LETTERS)}")
    return tuple(_LETTERS[letter] for letter in letters)


def _time_step_limit(text: Fields) -> tuple[float, float]:
    """Bounds of dt; infinity may be null, JSON's Infinity or ``{"__float__": "Infinity"}``."""
    value = text.get("time_step_limit", [0.0, None])
    rule = "it must be two numbers, the lower one first and not negative"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        text.refuse("time_step_limit", rule)
    bounds = []
    for bound in value:
        infinite = bound is None or bound == {"__float__": "Infinity"}
        if not infinite and (isinstance(bound, bool) or not isinstance(bound, (int, float))):
            text.refuse("time_step_limit", rule)
        bounds.append(math.inf if infinite else float(bound))
    low, high = bounds
    if not 0 <= low < high:
        text.refuse("time_step_limit", rule)
    return low, high


class Attention(nn.Module):
    """Grouped-query attention without position embedding, norms or gate."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[..., Hkv, D]`` of rows ``x [..., H]``."""
        heads = (self.num_kv_heads, self.head_dim)
        return self.k_proj(x).unflatten(-1, heads), self.v_proj(x).unflatten(-1, heads)

    def forward(
        self, x: torch.Tensor, attend: Attend, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention output of ``x [..., T, H]``, or of its ``rows`` only (indices into T)."""
        k, v = self.keys_values(x)
        if rows is not None:
            x = x.index_select(-2, rows)
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return self.o_proj(attend(q, k, v).flatten(-2))


def _mixer(config: NemotronHConfig, kind: str) -> nn.Module:
    if kind == MAMBA:
        return Mamba2(
            config.hidden_size,
            config.mamba_num_heads,
            config.mamba_head_dim,
            config.n_groups,
            config.ssm_state_size,
            config.conv_kernel,
            config.layer_norm_epsilon,
            config.use_conv_bias,
            config.use_bias,
            config.time_step_limit,
        )
    if kind == ATTENTION:
        return Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.attention_bias,
        )
    if kind == MLP:
        return Relu2MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
    assert config.router is not None
    return Relu2Moe(
        config.hidden_size,
        config.router,
        config.moe_intermediate_size,
        config.moe_shared_expert_intermediate_size,
        config.moe_latent_size,
        config.mlp_bias,
    )


class Layer(nn.Module):
    """One mixer behind a norm and a residual; ``kind`` says which, and what it needs."""

    def __init__(self, config: NemotronHConfig, kind: str):
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer: Any = _mixer(config, kind)

    def attend(
        self, x: torch.Tensor, attend: Attend, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed = self.mixer(self.norm(x), attend, rows)
        return (x if rows is None else x.index_select(-2, rows)) + mixed

    def recur(self, x: torch.Tensor, states: DecayStates) -> torch.Tensor:
        return x + self.mixer(self.norm(x), states)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class NemotronHTarget(Target):
    """The model: token ids to final hidden states to logits."""

    config: NemotronHConfig

    def __init__(self, config: NemotronHConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        mixing = [i for i, kind in enumerate(config.layer_types) if kind in (MAMBA, ATTENTION)]
        #: After this layer nothing mixes rows.
        self.last_mixing = mixing[-1] if mixing else -1

    @property
    def prunable(self) -> bool:
        """Whether the last layer that mixes rows is attention, so that unread rows of it and of
        all later layers can be left out."""
        return self.last_mixing >= 0 and self.config.layer_types[self.last_mixing] == ATTENTION

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: TargetStates,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of rows that nobody reads, the last layer that mixes rows computes neither queries nor
        output if it is attention, and the row-wise layers after it see nothing."""
        x = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            chosen = rows if index == self.last_mixing else None
            if layer.kind == ATTENTION:
                x = layer.attend(x, states.attention(index), chosen)
            elif layer.kind == MAMBA:
                x = layer.recur(x, states.recurrent(index))
                if chosen is not None:
                    x = x.index_select(-2, chosen)
            else:
                x = layer(x)
        return self.norm(x)


class NemotronHMtpHead(DraftHead):
    """The built-in draft head. It shares the target's embedding and lm_head.

    As in the checkpoints, the fusion belongs to the first layer and the final norm, which unlike
    the others subtracts the mean, to the last.
    """

    def __init__(self, config: NemotronHConfig):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.mtp_layer_types)
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        first.enorm = nn.RMSNorm(size, eps=eps)
        first.hnorm = nn.RMSNorm(size, eps=eps)
        first.eh_proj = nn.Linear(2 * size, size, bias=config.mlp_bias)
        last.final_layernorm = nn.LayerNorm(size, eps=eps, bias=False)

    def fuse(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Input ``[..., H]`` of the embeddings of tokens p+1 and the hidden states of p."""
        first: Any = self.layers[0]
        return first.eh_proj(torch.cat((first.enorm(embedding), first.hnorm(hidden)), -1))

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normed output ``[N or len(rows), H]``: input of lm_head and ``hidden`` of row p+1."""
        layers: list[Any] = list(self.layers)
        x = layers[0].attend(self.fuse(embedding, hidden), attend, rows)
        for layer in layers[1:]:
            x = layer(x)
        return layers[-1].final_layernorm(x)

    def store(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of rows whose output nobody reads (prefill)."""
        first: Any = self.layers[0]
        return first.mixer.keys_values(first.norm(self.fuse(embedding, hidden)))
