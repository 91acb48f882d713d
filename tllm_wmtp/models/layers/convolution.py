"""The causal depthwise convolution before a recurrent layer's rule."""

from __future__ import annotations

import torch


def causal_convolution(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Output ``[B, T, C]`` of taps ``weight [C, kernel]``, the last of which meets the row itself.

    Args:
        window: ``[B, kernel - 1 + T, C]``: consecutive rows after the inputs that precede them; or
            ``[B, T, kernel, C]``: each row's own inputs, oldest first, where rows form a tree
            (:func:`tllm_wmtp.tree.convolution_index`).
    """
    kernel = weight.shape[1]
    if window.dim() == 3:
        rows = window.shape[1] - kernel + 1
        inputs = tuple(window[:, tap : tap + rows] for tap in range(kernel))
    else:
        inputs = window.unbind(2)
    out = inputs[0] * weight[:, 0]
    for tap in range(1, kernel):
        out = torch.addcmul(out, inputs[tap], weight[:, tap])
    return out
