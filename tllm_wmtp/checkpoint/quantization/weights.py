"""Quantized weights as they are stored, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Largest magnitudes of the two element types: E2M1 (sign, 2 exponent bits, 1 mantissa bit) and
#: E4M3 without infinities.
E2M1_MAX, E4M3_MAX = 6.0, 448.0
#: Elements that share one scale in NVFP4.
BLOCK = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
#: The two elements of every byte, low nibble first, ``[256, 2]``.
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)


@dataclass(frozen=True)
class NvFp4Weight:
    """A weight ``[..., out, in]`` in NVFP4: ``element * block scale * global scale``.

    Args:
        packed: uint8 ``[..., out, in / 2]``; the low nibble holds the even column, a nibble is
            sign and E2M1 code.
        block_scale: float8_e4m3fn ``[..., out, in / 16]``.
        global_scale: float32, ``[]`` or ``[E, 1, 1]``, a factor.
        input_scale: float32 of the same shapes: the largest activation seen in calibration over
            ``6 * 448``; None where the weight alone was quantized.
        global_divisor: the reciprocal of ``global_scale`` if the file holds that, as
            compressed-tensors' do. Its library divides by it, and so does :meth:`dequantize`: the
            quotient and the product with the rounded reciprocal may differ in the last bit.
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    global_divisor: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    def dequantize(self) -> torch.Tensor:
        """float32 ``[..., out, in]``; rounded to bfloat16, it is what the writing library gives."""
        if self.global_divisor is None:
            scale = self.block_scale.float() * self.global_scale
        else:
            scale = self.block_scale.float() / self.global_divisor
        values = _PAIRS.to(self.packed.device)[self.packed.int()].flatten(-2)
        values.unflatten(-1, (-1, BLOCK)).mul_(scale.unsqueeze(-1))
        return values


@dataclass(frozen=True)
class Fp8Weight:
    """A weight ``[..., out, in]`` in FP8: ``value * scale``.

    Args:
        values: float8_e4m3fn.
        scale: ``[]``, ``[E, 1, 1]`` or ``[..., out, 1]``, or with ``block`` ``[..., ceil(out /
            block[0]), ceil(in / block[1])]``; a factor.
        block: rows and columns that share one scale.
        input_scale: float32 ``[]`` or ``[E, 1, 1]``: the largest activation over 448; None where
            activations are scaled as they come.
    """

    values: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None = None
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dequantize(self) -> torch.Tensor:
        """float32 ``[..., out, in]``."""
        scale = self.scale.float()
        if self.block is not None:
            rows, columns = self.values.shape[-2:]
            scale = scale.repeat_interleave(self.block[0], -2)[..., :rows, :]
            scale = scale.repeat_interleave(self.block[1], -1)[..., :columns]
        return self.values.float() * scale
