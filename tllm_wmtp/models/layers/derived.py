"""A tensor computed from a weight, kept until the weight changes."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Derived:
    """``derive(weight)``: recomputed under autograd, made once per weight version otherwise."""

    def __init__(self, derive: Callable[[torch.Tensor], torch.Tensor]):
        self._derive = derive
        self._kept: torch.Tensor | None = None
        self._key: tuple[object, ...] = ()

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and weight.requires_grad:
            return self._derive(weight)
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.device)
        if self._kept is None or self._key != key:
            self._kept, self._key = self._derive(weight.detach()), key
        return self._kept
