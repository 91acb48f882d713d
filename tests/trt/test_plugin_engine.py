"""Engine deserialization and enqueue under TensorRT: only where an SDK and a GPU are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.trt


def test_engine_agrees_with_cpu_kernels(plugin_build: Path) -> None:
    program = plugin_build / "plugins/tests/trt_engine_enqueue"
    if not program.exists():
        pytest.skip("built without an SDK: set TENSORRT_ROOT")
    command = [str(program), str(plugin_build / "lib/libwmtp_tensorrt.so")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("ok")
