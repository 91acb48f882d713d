"""The plugin as these tests need it, and a record of what they found."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import toolchain
from toolchain import REPOSITORY

BUILD = REPOSITORY / "build/cuda"  # the kernels' own: they are compiled once
RESULTS = REPOSITORY / "build/trt-results.json"

_results: dict[str, str] = {}


@pytest.fixture(scope="session")
def plugin_build() -> Path:
    """The plugin, its variants over host memory, and the programs that drive them."""
    options = ["-DWMTP_CUDA=ON", "-DWMTP_TENSORRT=ON", "-DWMTP_TESTS=ON"]
    return toolchain.build(
        BUILD, "wmtp_tensorrt_tests", f"-DWMTP_NVCC={toolchain.nvcc()}", *options
    )


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
