"""RMS norms of the Qwen3.5 family."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.layers.derived import Derived


class RMSNorm(nn.Module):
    """``x / rms(x) * (1 + weight)``, over the last axis: the weight is stored minus one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps
        self._scale = Derived(lambda weight: 1.0 + weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self._scale(self.weight), self.eps)


class GatedRMSNorm(nn.Module):
    """``weight * x / rms(x) * silu(gate)``, over the last axis."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)
