"""Quantizing a weight to NVFP4, by the rules of NVIDIA Model Optimizer's default (amax) recipe.

The largest magnitude of the tensor maps to the largest block scale times the largest element
(``6 * 448``), the largest magnitude of a block to the largest element, and every element rounds to
the nearest E2M1 value, ties to the even code. ``tests/parity/test_modelopt_nvfp4.py`` holds the
result to the library's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tllm_wmtp.checkpoint.quantization.weights import BLOCK, E2M1_MAX, E4M3_MAX, NvFp4Weight

#: The smallest positive E4M3 number: a block scale of 0 would turn its block into nothing.
_SMALLEST_SCALE = 2.0**-9


def global_scale_of(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The float32 factor ``amax / (6 * 448)`` that ``weights`` share.

    Weights that one matrix product reads together (q, k, v; gate, up) must share it. It is 1 where
    all of them are zero.
    """
    amax = torch.stack([weight.abs().amax() for weight in weights]).amax().float()
    return torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), 1.0)


def pack(
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> NvFp4Weight:
    """Quantizes ``weight [..., out, in]``, float32 or bfloat16; ``in`` is a multiple of 16."""
    if global_scale is None:
        global_scale = global_scale_of([weight])
    blocks = weight.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1).float() / (E2M1_MAX * global_scale)
    scale = torch.where(scale == 0, 1.0, scale)  # a block of zeros: any scale will do
    block_scale = scale.clamp(_SMALLEST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks / (block_scale.float() * global_scale).unsqueeze(-1)
    codes = _codes(scaled.flatten(-2))
    packed = codes[..., 1::2] << 4 | codes[..., 0::2]
    return NvFp4Weight(packed, block_scale, global_scale, input_scale)


def _codes(x: torch.Tensor) -> torch.Tensor:
    """uint8 sign-and-E2M1 codes of ``x``.

    Their magnitudes are evenly spaced by 0.5 up to 2, by 1 up to 4 and by 2 above, and rounding
    half to even on each of these grids takes ties to the even code.
    """
    size = x.abs()
    code = torch.where(
        size < 2,
        (2 * size).round(),
        torch.where(size < 4, size.round() + 2, (size / 2).round() + 4),
    )
    return code.clamp_(max=7).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
