"""Which experts a forward chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tllm_wmtp.models.layers.moe import RoutedExperts


@contextmanager
def chosen_experts(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list that gets the experts ``[N, k]`` of every mixture that ``module`` runs, in order."""
    chosen: list[torch.Tensor] = []
    layers = [layer for layer in module.modules() if isinstance(layer, RoutedExperts)]

    def recording(mix: Any) -> Any:
        def record(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            chosen.append(experts)
            return mix(x, weights, experts)

        return record

    for layer in layers:
        layer.mix = recording(layer.mix)  # type: ignore[method-assign]
    try:
        yield chosen
    finally:
        for layer in layers:
            del layer.mix
