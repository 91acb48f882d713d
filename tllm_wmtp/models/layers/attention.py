"""Grouped-query attention with per-head norms, partial rotary and an output gate."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from tllm_wmtp.models.layers.norm import RMSNorm
from tllm_wmtp.models.layers.rope import Rope


class Attend(Protocol):
    """Stores rotated ``k, v [..., n, Hkv, D]`` and answers ``q [..., m, Hq, D]``.

    The layer computes the projections; whoever owns the keys (paged pool, ring, plain causal
    training) is behind this call. ``m < n`` when only some rows are asked for.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class GatedAttention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rope: Rope,
        bias: bool = False,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim * 2, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)
        self._rope = (rope,)  # shared by layers, so not a submodule of any

    def keys_values(
        self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (normed, rotated) and V ``[..., Hkv, D]`` of rows ``x [..., H]``."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return Rope.rotate(k, table), v

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention output of ``x [..., T, H]``, or of its ``rows`` only (indices into T)."""
        rope = self._rope[0]
        table = rope.table(positions, x.dtype)
        k, v = self.keys_values(x, table)
        if rows is not None:
            x, table = x.index_select(-2, rows), Rope.select(table, rows)
        q, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).chunk(2, dim=-1)
        q = Rope.rotate(self.q_norm(q), table)
        out = attend(q, k, v) * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2))
