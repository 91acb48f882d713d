"""Grouped-query attention without an output gate; norms of queries and keys are optional."""

from __future__ import annotations

import torch
from torch import nn

from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.layers.decoder_block import AttentionLayer
from tllm_wmtp.models.layers.rope import Rope


class PlainAttention(AttentionLayer):
    """``bias`` is that of the q, k and v projections; the output projection has none.

    ``qk_norm_eps`` gives queries and keys an RMS norm per head, None gives them none.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Rope,
        bias: bool,
        qk_norm_eps: float | None = None,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(head_dim, qk_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, qk_norm_eps)
        self._rope = (rope,)  # shared by layers, so not a submodule of any

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys_values(x, self._rope[0].table(positions, x.dtype))

    def _keys_values(
        self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        table = self._rope[0].table(positions, x.dtype)
        k, v = self._keys_values(x, table)
        if rows is not None:
            x, table = x.index_select(-2, rows), Rope.select(table, rows)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)))
        return self.o_proj(attend(Rope.rotate(q, table), k, v).flatten(-2))
