"""Our NVFP4 against NVIDIA Model Optimizer's, bit for bit.

Slow, and needs ``pip install 'tllm-wmtp[quantize]'``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.quantization import NvFp4Weight
from tllm_wmtp.checkpoint.quantization.packing import pack
from tllm_wmtp.checkpoint.quantize import Calibration, quantize_checkpoint
from tllm_wmtp.checkpoint.recipe import Recipe
from tllm_wmtp.demo import CHECKPOINT, language

pytestmark = pytest.mark.slow
pytest.importorskip("modelopt.torch.quantization")


def library() -> Any:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    return NVFP4QTensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_packing_and_unpacking_are_those_of_model_optimizer(
    dtype: torch.dtype, spread: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(64, 256, generator=generator) * spread).to(dtype)
    weight[3, 16:32] = 0
    weight[5] *= 1e-6  # block scales below the smallest
    weight[7, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5] * 2) * spread  # ties
    quantized, scale, global_scale = library().quantize(weight.clone(), 16)
    ours = pack(weight)
    assert torch.equal(ours.packed, quantized._quantized_data)
    assert torch.equal(bits(ours.block_scale), bits(scale))
    assert torch.equal(ours.global_scale, global_scale)
    theirs = NvFp4Weight(quantized._quantized_data, scale, global_scale)
    for as_type in (torch.float32, torch.bfloat16):
        again = quantized.dequantize(
            dtype=as_type, scale=scale, double_scale=global_scale, block_sizes={-1: 16}
        )
        assert torch.equal(theirs.dequantize().to(as_type), again)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demonstration checkpoint by either backend, calibrated on the same tokens."""
    root = tmp_path_factory.mktemp("copies")
    ids = language.prompt("logs", 512, seed=1).ids + language.prompt("records", 512, seed=1).ids
    calibration = Calibration([ids[:512], ids[512:1024]], dtype="bfloat16")
    paths = {backend: root / backend for backend in ("builtin", "modelopt")}
    for backend, path in paths.items():
        quantize_checkpoint(CHECKPOINT, path, Recipe(), calibration, backend)
    return paths


def test_both_backends_write_the_same_weights(copies: dict[str, Path]) -> None:
    ours, theirs = (load_file(copies[name] / "model.safetensors") for name in copies)
    assert ours.keys() == theirs.keys()
    compared = 0
    for name, tensor in ours.items():
        if name.endswith(".input_scale"):
            # One calibration runs our modules and the other transformers', both in bfloat16.
            torch.testing.assert_close(tensor, theirs[name], rtol=0.03, atol=0, msg=name)
            continue
        assert torch.equal(bits(tensor), bits(theirs[name])), name
        compared += tensor.dtype == torch.uint8
    assert compared == 152


def test_both_backends_say_the_same(copies: dict[str, Path]) -> None:
    for name in ("config.json", "hf_quant_config.json"):
        ours, theirs = ((copies[backend] / name).read_text() for backend in copies)
        assert ours == theirs
    ours, theirs = (CheckpointDirectory(path) for path in copies.values())
    assert ours.names == theirs.names


def test_an_export_of_model_optimizer_is_read_as_the_library_means_it(tmp_path: Path) -> None:
    """Its own directory, untouched by us: every weight is what the library dequantizes."""
    import modelopt.torch.export as export
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    ids = torch.tensor([language.prompt("logs", 128, seed=1).ids])
    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward_loop=lambda m: m(ids))
    export.export_hf_checkpoint(model, export_dir=tmp_path)
    directory = CheckpointDirectory(tmp_path)
    assert directory.quantization is not None
    assert directory.quantization.algorithm == "NVFP4"
    plain = CheckpointDirectory(CHECKPOINT)
    quantized = 0
    for name in directory.names:
        found = directory.quantized(name)
        if found is None:
            assert torch.equal(directory.tensor(name).bfloat16(), plain.tensor(name).bfloat16())
            continue
        assert isinstance(found, NvFp4Weight)
        tensor = library()(torch.Size(found.shape), torch.bfloat16, found.packed)
        again = tensor.dequantize(
            scale=found.block_scale, double_scale=found.global_scale, block_sizes={-1: 16}
        )
        assert torch.equal(directory.tensor(name).bfloat16(), again), name
        quantized += 1
    assert quantized == 121
