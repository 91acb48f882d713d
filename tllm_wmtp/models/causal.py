"""States for whole sequences that begin at position 0: training, and the plain reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tllm_wmtp.models.layers.gated_delta import chunked_gated_delta_rule
from tllm_wmtp.models.layers.mamba2 import chunked_ssd


class CausalStates:
    """Every layer starts from nothing and keeps nothing. Differentiable; serves all layers.

    Attention expects all rows to be queries (m = n), ``[B, T, heads, D]``; ``scale`` multiplies its
    scores, ``D ** -0.5`` when None.
    """

    def __init__(self, conv_kernel: int = 1, chunk: int = 64, scale: float | None = None):
        self.conv_kernel = conv_kernel
        self.chunk = chunk
        self.scale = scale

    def attention(self, layer: int) -> CausalStates:
        return self

    def recurrent(self, layer: int) -> CausalStates:
        return self

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def convolution_window(self, mixed: torch.Tensor) -> torch.Tensor:
        return F.pad(mixed, (0, 0, self.conv_kernel - 1, 0))

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        return chunked_gated_delta_rule(q, k, v, g, beta, state, self.chunk)[0]

    def decayed_sum(
        self, q: torch.Tensor, k: torch.Tensor, delta: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, width = delta.shape[0], delta.shape[2], delta.shape[3]
        state = q.new_zeros(batch, heads, q.shape[3], width, dtype=torch.float32)
        return chunked_ssd(q, k, delta, g, state, self.chunk)[0]
