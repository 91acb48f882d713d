"""Compilers and checkpoints that several of these tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import toolchain

from tllm_wmtp.demo import CHECKPOINT

sys.path.insert(0, str(Path(__file__).parent))

from nvfp4_checkpoint import quantized_copy


@pytest.fixture(scope="session")
def nvfp4_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration checkpoint in NVFP4, its draft head included."""
    return quantized_copy(CHECKPOINT, tmp_path_factory.mktemp("nvfp4") / "demo")


@pytest.fixture(scope="session")
def builder() -> None:
    """The plugin library and TensorRT-RTX, where the package looks for them."""
    options = ["-DWMTP_CUDA=ON", "-DWMTP_TENSORRT=ON", "-DWMTP_TESTS=ON"]
    folder = toolchain.REPOSITORY / "build/cuda"
    toolchain.build(folder, "wmtp_tensorrt", f"-DWMTP_NVCC={toolchain.nvcc()}", *options)
    toolchain.script("tests/trt/trt_libraries.py").RTX.install()
