"""Weights that other libraries packed, against what these libraries make of them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import hf_config, write_checkpoint

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.quantization import NvFp4Weight

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import generate_gparam

NAME = "model.layers.3.self_attn.q_proj"


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) * 0.2
    return (torch.randn(rows, columns, generator=generator) * spread).bfloat16()


def write(path: Path, scheme: QuantizationScheme, format: str, parts: dict[str, Any]) -> Any:
    """A directory whose metadata the library wrote."""
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=format,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    statement = config.model_dump(mode="json")
    tensors = {f"{NAME}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    write_checkpoint(path, hf_config() | {"quantization_config": statement}, tensors)
    return CheckpointDirectory(path)


def test_nvfp4_of_compressed_tensors_is_read_bit_for_bit(tmp_path: Path) -> None:
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    weight = random_weight(96, 128)
    divisor = generate_gparam(weight.amin(), weight.amax())
    amax = weight.unflatten(-1, (-1, 16)).abs().amax(-1).float()
    scale = (divisor * amax / 6).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    plain = {
        "weight": weight,
        "weight_scale": scale,
        "weight_global_scale": divisor,
        "input_global_scale": torch.tensor([20.0]),
    }
    parts = NVFP4PackedCompressor.compress(plain, scheme)
    again = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    directory = write(tmp_path, scheme, "nvfp4-pack-quantized", parts)
    assert directory.names == [f"{NAME}.weight"]
    ours = directory.tensor(f"{NAME}.weight")
    assert torch.equal(ours.bfloat16(), again)
    assert (ours - weight.float()).abs().max() < 0.2 * weight.abs().max()
    stored = directory.quantized(f"{NAME}.weight")
    assert isinstance(stored, NvFp4Weight)
    assert stored.input_scale is not None
    assert stored.input_scale.item() == pytest.approx(1 / 20)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8_of_compressed_tensors_is_read_bit_for_bit(
    tmp_path: Path, strategy: str, scale_type: torch.dtype
) -> None:
    weight = random_weight(96, 128, seed=1)
    block = [32, 16] if strategy == "block" else None
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=8, type="float", strategy=strategy, block_structure=block
        ),
        input_activations=QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
    )
    size = weight.float().abs()
    amax = {
        "tensor": lambda: size.amax().reshape(1),
        "channel": lambda: size.amax(1, keepdim=True),
        "block": lambda: size.unflatten(0, (-1, 32)).unflatten(2, (-1, 16)).amax((1, 3)),
    }[strategy]()
    plain = {"weight": weight, "weight_scale": (amax / 448).to(scale_type)}
    parts = FloatQuantizationCompressor.compress(plain, scheme)
    again = FloatQuantizationCompressor.decompress(parts, scheme)["weight"]
    directory = write(tmp_path, scheme, "float-quantized", parts)
    ours = directory.tensor(f"{NAME}.weight")
    assert torch.equal(ours.to(again.dtype), again)


def test_fp8_blocks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = random_weight(256, 384, seed=2).float()
    scale = weight.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = (weight / wide).to(torch.float8_e4m3fn)
    statement = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(
        tmp_path,
        hf_config() | {"quantization_config": statement},
        {f"{NAME}.weight": values, f"{NAME}.weight_scale_inv": scale},
    )
    ours = CheckpointDirectory(tmp_path).tensor(f"{NAME}.weight")
    assert torch.equal(ours, fp8.Fp8Dequantize(None)._dequantize_one(values, scale))
