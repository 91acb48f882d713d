"""The plugin as these tests need it, and a record of what they found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from trt_libraries import REPOSITORY

BUILD = REPOSITORY / "build/cuda"  # the kernels' own: they are compiled once
RESULTS = REPOSITORY / "build/trt-results.json"
TOOLCHAIN = ("cuda-nvcc", "cuda-runtime", "cuda-crt", "nvvm", "cuda-cccl")

_results: dict[str, str] = {}


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"no {name}: install the package's test extra")
    return found


def nvcc() -> str:
    """The system's, or one fetched into build/ (271 MB, once)."""
    found = shutil.which("nvcc")
    if found is not None:
        return found
    folder = REPOSITORY / "build/cuda-toolchain"
    for place in (*(Path(path) / "nvidia" for path in sys.path), folder / "nvidia"):
        for compiler in place.glob("cu*/bin/nvcc"):
            return str(compiler)
    pins = [f"nvidia-{part}==13.0.*" for part in TOOLCHAIN]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *pins]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"no nvcc, and {', '.join(pins)} cannot be installed: install the CUDA toolkit, or "
            f'deselect these tests with -m "not trt".\n{result.stderr[-1000:]}'
        )
    return str(next(folder.glob("nvidia/cu*/bin/nvcc")))


@pytest.fixture(scope="session")
def plugin_build() -> Path:
    """The plugin, its variants over host memory, and the programs that drive them."""
    BUILD.mkdir(parents=True, exist_ok=True)
    configure = [tool("cmake"), "-S", str(REPOSITORY), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DWMTP_NVCC={nvcc()}"]
    configure += ["-DWMTP_PYTHON=OFF", "-DWMTP_CUDA=ON", "-DWMTP_TENSORRT=ON", "-DWMTP_TESTS=ON"]
    build = [tool("cmake"), "--build", str(BUILD), "--target", "wmtp_tensorrt_tests"]
    for command in (configure, build):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return BUILD


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.path.parent == Path(__file__).parent and (
        report.when == "call" or report.outcome != "passed"
    ):
        _results[item.name] = report.outcome
    return report


def pytest_sessionfinish(session: Any) -> None:
    """What docs/plugin.md reports; build_scripts/plugin_verification.py writes it there."""
    if _results:
        RESULTS.write_text(json.dumps(_results, indent=1, sort_keys=True) + "\n")
