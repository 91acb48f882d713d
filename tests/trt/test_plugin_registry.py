"""The plugin in the registry of real TensorRT libraries, every virtual called from C++."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from trt_libraries import DISPATCH, Package, dispatch_library

pytestmark = pytest.mark.trt

EVERYWHERE = [
    "listed",
    "good_fields",
    "bad_fields",
    "interfaces",
    "aliases",
    "tactics",
    "outputs",
    "formats",
    "shape_rules",
    "workspace",
    "round_trips",
]
ON_HOST_MEMORY = ["steps_agree_with_oracle", "tree_rows_see_ancestors_only", "enqueue_refusals"]


def drive(build: Path, tensorrt: Path, plugin: str, scenario: str) -> None:
    program = [build / "plugins/tests/trt_harness", tensorrt, build / "lib" / plugin, scenario]
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run(
        [str(part) for part in program], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(f"ok {scenario}\n")


@pytest.fixture(params=DISPATCH, ids=lambda package: package.version)
def tensorrt(request: pytest.FixtureRequest) -> Path:
    package: Package = request.param
    return dispatch_library(package)


@pytest.mark.parametrize("scenario", [*EVERYWHERE, *ON_HOST_MEMORY])
def test_sanitized_plugin_over_host_memory(
    plugin_build: Path, tensorrt: Path, scenario: str
) -> None:
    drive(plugin_build, tensorrt, "libwmtp_tensorrt_host.so", scenario)


@pytest.mark.parametrize("scenario", EVERYWHERE)
def test_plugin_with_its_kernels(plugin_build: Path, tensorrt: Path, scenario: str) -> None:
    drive(plugin_build, tensorrt, "libwmtp_tensorrt.so", scenario)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_missing_device_is_reported_in_words(plugin_build: Path, tensorrt: Path) -> None:
    drive(plugin_build, tensorrt, "libwmtp_tensorrt.so", "no_device_is_reported")
