"""The executor's draft loop on the CUDA kernels' own source, compiled for the host emulator."""

from __future__ import annotations

import random
from typing import Any

import pytest
import toolchain
import torch
from oracle import Oracle
from test_draft_loop import SINK, WINDOW, compare_all_steps, requests

from tllm_wmtp.ops import cuda
from tllm_wmtp.trtllm import kv, register


@pytest.fixture(scope="module")
def ops() -> Any:
    folder = toolchain.REPOSITORY / "build/cuda-emulated"
    toolchain.build(folder, "wmtp_cuda_emulated", "-DWMTP_CUDA_EMULATION=ON")
    return cuda.CudaOps(folder / "lib/libwmtp_cuda_emulated.so")


@pytest.mark.parametrize("layout", ["late"], indirect=True)
def test_the_kernels_draft_what_the_embedded_runtime_does(
    vendor: Any, configure: Any, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "_windowed_draft_attention", ops.windowed_draft_attention)
    configure(window=WINDOW, n_sink=SINK)
    register()
    executor = vendor.executor(vendor.model(), chunk=vendor.chunk)
    luck = random.Random(3)
    executor.hits = lambda one: luck.randrange(4)
    oracle = Oracle(executor, WINDOW, SINK, lanes=8)
    with torch.inference_mode():
        assert compare_all_steps(executor, oracle, requests([40, 3, 21], 14)) > 12
