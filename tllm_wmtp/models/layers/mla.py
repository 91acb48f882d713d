"""Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1).

The cache holds one vector per token for all heads: the normed latent ``c [R]`` and the rotated key
part ``k_pe [P]``. With the up-projection split per head into ``W_uk [Dn, R]`` and ``W_uv [Dv, R]``,

    q . k = q_nope . (W_uk c) + q_pe . k_pe = [W_uk^T q_nope, q_pe] . [c, k_pe]
    attention output = W_uv (sum of weighted c)

so it is grouped-query attention with one KV head of dimension R + P. The values are the same
vectors as the keys; the last P elements of a weighted sum of them are left unread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.layers.decoder_block import AttentionLayer
from tllm_wmtp.models.layers.rope import Rope

#: The norms of latents have this epsilon in every published model, whatever ``rms_norm_eps`` says.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of the projections, per token or per head.

    Args:
        q_lora_rank: the query's latent, None where queries are projected at once.
        kv_lora_rank: R, the latent of keys and values.
        nope_dim, rope_dim: Dn and P, the parts of a query head without and with rotation.
        value_dim: Dv.
        interleaved: whether pair i of the rotation is elements 2i and 2i + 1 of the projections,
            instead of i and i + P / 2.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    bias: bool

    @property
    def cached_dim(self) -> int:
        """R + P."""
        return self.kv_lora_rank + self.rope_dim


class LatentAttention(AttentionLayer):
    """The caller's ``attend`` must scale scores by ``(Dn + P) ** -0.5`` and YaRN's factor."""

    def __init__(self, hidden_size: int, config: LatentConfig, rope: Rope):
        super().__init__()
        self.config = config
        query_size = config.num_heads * (config.nope_dim + config.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=config.bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, config.cached_dim, bias=config.bias)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank,
            config.num_heads * (config.nope_dim + config.value_dim),
            bias=False,
        )
        self.o_proj = nn.Linear(config.num_heads * config.value_dim, hidden_size, bias=config.bias)
        self._rope = (rope,)  # shared by layers, so not a submodule of any

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys_values(x, self._rope[0].table(positions, x.dtype))

    def _keys_values(
        self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        sizes = (config.kv_lora_rank, config.rope_dim)
        latent, k_pe = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split(sizes, dim=-1)
        cached = torch.cat((self.kv_a_layernorm(latent), self._rotate(k_pe, table)), -1)
        return cached, cached

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config = self.config
        table = self._rope[0].table(positions, x.dtype)
        k, v = self._keys_values(x, table)
        if rows is not None:
            x, table = x.index_select(-2, rows), Rope.select(table, rows)
        up = self.kv_b_proj.weight.unflatten(0, (config.num_heads, -1))  # [heads, Dn + Dv, R]
        w_uk, w_uv = up.split((config.nope_dim, config.value_dim), dim=1)
        q_nope, q_pe = self._queries(x).split((config.nope_dim, config.rope_dim), dim=-1)
        absorbed = torch.einsum("...hd,hdr->...hr", q_nope, w_uk)
        q = torch.cat((absorbed, self._rotate(q_pe, table)), -1)
        weighted = attend(q, k, v)[..., : config.kv_lora_rank]
        return self.o_proj(torch.einsum("...hr,hdr->...hd", weighted, w_uv).flatten(-2))

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., heads, Dn + P]``."""
        if self.config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.config.num_heads, -1))

    def _rotate(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotated ``x [..., heads, P]``, pairs halves apart whatever they were: a score does not
        depend on the order, as long as queries and keys agree."""
        if self.config.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return Rope.rotate(x, table)
