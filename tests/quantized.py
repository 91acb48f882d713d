"""Random quantized weights in every published layout, with what they stand for.

Nothing here uses the package: elements are decoded from their bits, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Weights = dict[str, torch.Tensor]
#: A weight's shape and the names' beginnings to its stored parts and its float64 values.
Make = Callable[[tuple[int, ...], torch.Generator], tuple[Weights, np.ndarray]]


def decode_e2m1(code: int) -> float:
    """Sign, two exponent bits (bias 1), one mantissa bit; subnormal where the exponent is 0."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if code & 8 else size


def decode_e4m3(byte: int) -> float:
    """Sign, four exponent bits (bias 7), three mantissa bits."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa / 8 * 2.0**-6
    return -size if byte & 0x80 else size


E2M1 = np.array([decode_e2m1(code) for code in range(16)])
E4M3 = np.array([decode_e4m3(byte) for byte in range(256)])


def decode_fp8(tensor: torch.Tensor) -> np.ndarray:
    return E4M3[tensor.view(torch.uint8).numpy()]


def decode_nvfp4(packed: torch.Tensor, block_scale: torch.Tensor) -> np.ndarray:
    """Element times block scale, in float64: the product has six significant bits, so exact."""
    codes = packed.numpy()
    elements = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
    return E2M1[elements] * decode_fp8(block_scale).repeat(16, axis=-1)


def random_bytes(shape: tuple[int, ...], low: int, high: int, seed: torch.Generator) -> Any:
    return torch.randint(low, high, shape, generator=seed, dtype=torch.uint8)


def random_nvfp4(
    shape: tuple[int, ...], seed: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed elements, and block scales between 2^-2 and 2^2."""
    packed = random_bytes((*shape[:-1], shape[-1] // 2), 0, 256, seed)
    scale = random_bytes((*shape[:-1], shape[-1] // 16), 0x28, 0x49, seed)
    return packed, scale.view(torch.float8_e4m3fn)


def random_fp8(shape: tuple[int, ...], seed: torch.Generator) -> torch.Tensor:
    """Any finite value below 16."""
    signs = random_bytes(shape, 0, 2, seed) << 7
    return (random_bytes(shape, 0, 0x58, seed) | signs).view(torch.float8_e4m3fn)


GLOBAL, INPUT = 0.0123, 0.0456


def modelopt_nvfp4(shape: tuple[int, ...], seed: torch.Generator) -> tuple[Weights, np.ndarray]:
    packed, scale = random_nvfp4(shape, seed)
    factor = torch.tensor(GLOBAL)
    stored = {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(INPUT),
    }
    return stored, decode_nvfp4(packed, scale) * float(factor)


def compressed_nvfp4(shape: tuple[int, ...], seed: torch.Generator) -> tuple[Weights, np.ndarray]:
    packed, scale = random_nvfp4(shape, seed)
    divisor = torch.tensor([1 / GLOBAL])
    stored = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": divisor,
        "input_global_scale": torch.tensor([1 / INPUT]),
    }
    return stored, decode_nvfp4(packed, scale) / float(divisor)


def fp8_tensor(shape: tuple[int, ...], seed: torch.Generator) -> tuple[Weights, np.ndarray]:
    values, scale = random_fp8(shape, seed), torch.tensor(GLOBAL)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(INPUT)}
    return stored, decode_fp8(values) * float(scale)


def fp8_channel(shape: tuple[int, ...], seed: torch.Generator) -> tuple[Weights, np.ndarray]:
    values = random_fp8(shape, seed)
    scale = (torch.rand(*shape[:-1], 1, generator=seed) + 0.5).bfloat16()
    return {"weight": values, "weight_scale": scale}, decode_fp8(values) * scale.double().numpy()


def fp8_block(rows: int, columns: int, scale_name: str = "weight_scale_inv") -> Make:
    def make(shape: tuple[int, ...], seed: torch.Generator) -> tuple[Weights, np.ndarray]:
        values = random_fp8(shape, seed)
        blocks = (-(-shape[0] // rows), -(-shape[1] // columns))
        scale = torch.rand(*blocks, generator=seed) + 0.5
        row, column = np.arange(shape[0]) // rows, np.arange(shape[1]) // columns
        wide = scale.double().numpy()[row][:, column]
        return {"weight": values, scale_name: scale}, decode_fp8(values) * wide

    return make


def quantize_names(
    weights: Weights, make: Make, chosen: Callable[[str], bool], seed: int = 0
) -> tuple[Weights, Weights]:
    """The checkpoint with the chosen 2-D weights stored by ``make``, and the same in float32."""
    generator = torch.Generator().manual_seed(seed)
    stored, plain = {}, {}
    for name, weight in weights.items():
        if not chosen(name):
            stored[name] = plain[name] = weight
            continue
        module = name.removesuffix(".weight")
        parts, values = make(tuple(weight.shape), generator)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        plain[name] = torch.from_numpy(values).float()
    return stored, plain
