"""The CUDA kernels compile for every target without a GPU, spill nothing, and the library loads and
answers on a machine that has no driver."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest
import toolchain
import torch
from toolchain import REPOSITORY

from tllm_wmtp.ops import cuda

TARGETS = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
NO_DRIVER = 35  # cudaErrorInsufficientDriver

resources = toolchain.script("build_scripts/cuda_resources.py")


@pytest.fixture(scope="module")
def build() -> Path:
    """A build for all targets. It is kept, so that only changed sources are compiled again."""
    options = ["-DWMTP_CUDA=ON", f"-DWMTP_NVCC={toolchain.nvcc()}"]
    return toolchain.build(REPOSITORY / "build/cuda", "wmtp_cuda", *options)


@pytest.fixture(scope="module")
def ops(build: Path) -> cuda.CudaOps:
    return cuda.CudaOps(build / "lib/libwmtp_cuda.so")


def test_every_kernel_is_compiled_for_every_target(build: Path) -> None:
    kernels = resources.read(build)
    by_name: dict[str, list[str]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.kernel, []).append(kernel.target)
    assert len(by_name) == 12 + 5  # the tensor core instances, and the rest
    assert all(sorted(targets) == sorted(TARGETS) for targets in by_name.values())


def test_nothing_spills_and_blocks_stay_resident(build: Path) -> None:
    for kernel in resources.read(build):
        assert (kernel.spilled, kernel.stack) == (0, 0), kernel
        blocks = {"256": 2, "128": 3, "64": 4}.get(kernel.kernel.rpartition("head ")[2])
        if blocks is not None:  # a multiprocessor has 65,536 registers, given out by the eight
            assert -(-kernel.registers // 8) * 8 * 128 * blocks <= 65536, kernel


def test_the_report_is_what_the_compiler_says(build: Path) -> None:
    version, rows = resources.recorded()
    if version != resources.nvcc_version(build):
        pytest.skip(f"the report is of nvcc {version}")
    assert rows == [kernel.row() for kernel in resources.read(build)]


def test_the_compiler_warns_of_nothing(build: Path) -> None:
    for log in build.glob("cpp/src/cuda/*.o.txt"):
        assert not re.search(r"warning", log.read_text(), re.IGNORECASE), log


def test_only_the_c_interface_is_exported(build: Path) -> None:
    library = build / "lib/libwmtp_cuda.so"
    text = subprocess.run(
        [toolchain.tool("nm"), "-D", "--defined-only", str(library)], capture_output=True, text=True
    ).stdout
    names = [line.split()[-1] for line in text.splitlines()]
    assert "wmtp_cuda_run_windowed" in names
    assert [name for name in names if not name.startswith("wmtp_cuda_")] == []


def test_the_library_needs_no_cuda_library(build: Path) -> None:
    text = subprocess.run(
        [toolchain.tool("readelf"), "-d", str(build / "lib/libwmtp_cuda.so")],
        capture_output=True,
        text=True,
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", text)
    assert not [name for name in needed if "cuda" in name or "nv" in name]


def test_without_a_driver_a_launch_says_so(ops: cuda.CudaOps) -> None:
    if torch.cuda.is_available() or os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a driver")
    count = ctypes.c_int32(-1)
    assert ops._library.wmtp_cuda_sm_count(ctypes.byref(count)) == NO_DRIVER
    shape = cuda.WindowedShape(cuda.AttentionShape(16, 2, 256, 1, 1), 1, 1, 1, 1, 64, 4, 50, 0)
    buffers = cuda.WindowedBuffers(k_scale=1.0, v_scale=1.0)
    plan = ops.plan_windowed(shape, 132)
    arguments = [ctypes.byref(value) for value in (shape, plan, buffers)]
    assert ops._library.wmtp_cuda_run_windowed(*arguments, None) == NO_DRIVER
    assert b"driver" in ops._library.wmtp_cuda_error_text(NO_DRIVER)


def test_planning_is_that_of_the_emulated_library(ops: cuda.CudaOps) -> None:
    """``tests/unit/test_cuda_host.py`` holds that library's plan to arithmetic of its own."""
    shape = cuda.WindowedShape(cuda.AttentionShape(16, 2, 256, 1, 1), 1, 1, 1, 1, 4104, 4, 4092, 0)
    assert ops.plan_windowed(shape, 132).n_splits == 65


def test_a_cuda_call_without_a_device_is_an_error_not_a_crash() -> None:
    import tllm_wmtp.ops  # noqa: F401  (defines the operators)

    table = torch._C._dispatch_dump("wmtp::windowed_draft_attention")
    assert "CUDA" in table
