"""The block that dense decoders stack: attention and feed-forward, each behind a norm."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from tllm_wmtp.models.layers.attention import Attend


class AttentionLayer(nn.Module):
    """Self-attention whose keys and values live behind an :class:`Attend`."""

    @abstractmethod
    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated) and V ``[..., Hkv, D]`` of rows ``x [..., H]`` at ``positions [...]``."""

    @abstractmethod
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention output of ``x [..., T, H]``, or of its ``rows`` only (indices into T)."""


class DecoderBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; modules named as in
    checkpoints."""

    def __init__(
        self, hidden_size: int, eps: float, attention: AttentionLayer, feed_forward: nn.Module
    ):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps)
        self.mlp = feed_forward

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output of ``x [..., T, H]``, or of its ``rows`` only (indices into T)."""
        mixed = self.self_attn(self.input_layernorm(x), positions, attend, rows)
        x = (x if rows is None else x.index_select(-2, rows)) + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def store(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of rows ``x [..., H]`` whose output nobody reads."""
        return self.self_attn.keys_values(self.input_layernorm(x), positions)
