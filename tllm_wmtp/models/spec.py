"""What every family of models gives the executor: its caches, its target and its draft head.

The executor knows no family. It reads :class:`CacheSpec` to make pools, and runs a
:class:`Target` and a :class:`DraftHead`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import nn

from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.layers.gated_delta import DeltaStates
from tllm_wmtp.models.layers.mamba2 import DecayStates

#: The rules by which a recurrent layer's state takes up a row (:mod:`.layers.gated_delta`,
#: :mod:`.layers.mamba2`).
GATED_DELTA, DECAYED_SUM = "gated_delta", "decayed_sum"


@dataclass(frozen=True)
class KeyValueShape:
    """One attention layer's keys and values, ``[..., num_kv_heads, head_dim]`` each.

    ``scale`` multiplies the scores before the softmax.
    """

    num_kv_heads: int
    head_dim: int
    scale: float

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class RecurrentShape:
    """One recurrent layer's states: ``conv_kernel - 1`` rows of ``conv_channels`` before the causal
    convolution, and a float32 matrix ``[value_heads, key_dim, value_dim]``.

    Value head h reads key head ``h // (value_heads / key_heads)``.
    """

    conv_kernel: int
    conv_channels: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    rule: str = GATED_DELTA

    @property
    def history(self) -> int:
        """Rows that the convolution remembers."""
        return self.conv_kernel - 1


@dataclass(frozen=True)
class CacheSpec:
    """What one request keeps: keys and values of ``attention_layers`` (indices into the target's
    layers), states of ``recurrent_layers``, and the draft head's own keys and values."""

    attention_layers: tuple[int, ...]
    attention: KeyValueShape
    draft: KeyValueShape
    recurrent_layers: tuple[int, ...] = ()
    recurrent: RecurrentShape | None = None

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all of the target's attention layers."""
        return len(self.attention_layers) * self.attention.bytes_per_token(dtype)


class ModelConfig(Protocol):
    """A family's configuration, as far as the executor reads it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_experts(self) -> int:
        """Routed experts per layer, 0 in a dense model."""
        ...

    @property
    def num_experts_per_tok(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def tie_word_embeddings(self) -> bool: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def caches(self) -> CacheSpec: ...


class RecurrentStates(DeltaStates, DecayStates, Protocol):
    """Owner of one recurrent layer's states, under whichever rule."""


class TargetStates(Protocol):
    """State of one forward of the target: who owns the keys and the recurrent states."""

    def attention(self, layer: int) -> Attend: ...

    def recurrent(self, layer: int) -> RecurrentStates: ...


class Target(nn.Module):
    """A text model: token ids to final hidden states to logits."""

    config: ModelConfig
    embed_tokens: nn.Embedding
    lm_head: nn.Linear

    @property
    @abstractmethod
    def prunable(self) -> bool:
        """Whether nothing after the last attention layer mixes rows, so that rows nobody reads can
        be left out from there on."""

    @abstractmethod
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: TargetStates,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm.

        Args:
            ids, positions: ``[B, T]``.
            states: owner of keys and recurrent states.
            rows: indices into T whose hidden states are read, all when None; a prunable target
                leaves the others out of its last attention layer's queries and all that follows.

        Returns:
            ``[B, T or len(rows), H]``.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., vocab]`` of hidden states after the final norm ``[..., H]``."""
        return self.lm_head(hidden)


class DraftHead(nn.Module):
    """A built-in MTP head with one attention layer.

    Row p takes the embedding of token p+1 and the hidden state of row p, and predicts token p+2.
    """

    #: Weights that a checkpoint may leave to the target: the head's name to the target's.
    shared: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @abstractmethod
    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output ``[N or len(rows), H]``: what :meth:`logits` takes, and ``hidden`` of row p+1.

        Args:
            embedding, hidden: ``[N, H]``.
            positions: ``[N]``.
            attend: owner of the head's keys and values.
            rows: indices into N whose output is read, all when None.
        """

    @abstractmethod
    def store(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[N, Hkv, D]`` of rows whose output nobody reads (prefill)."""

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[..., H]`` that the head reads: the target's, unless it has its own."""
        return target.embed_tokens(ids)

    def logits(self, target: Target, output: torch.Tensor) -> torch.Tensor:
        """``[..., vocab]`` of :meth:`forward`'s output: by the target's, unless it has its own."""
        return target.logits(output)
