"""What a loader of the plugin depends on: the binary interface and the symbols."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.trt

GOLDEN = Path(__file__).parent / "cpp/abiTable.golden"
SYSTEM_LIBRARIES = {"libstdc++", "libm", "libgcc_s", "libc", "libdl", "librt", "libpthread"}


def output(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_declarations_have_tensorrts_binary_interface(plugin_build: Path) -> None:
    """Ours, or NVIDIA's where TENSORRT_ROOT names an SDK: the same table either way."""
    assert output(plugin_build / "plugins/tests/trt_abi_table") == GOLDEN.read_text()


def test_library_exports_two_symbols(plugin_build: Path) -> None:
    lines = output("nm", "-D", "--defined-only", plugin_build / "lib/libwmtp_tensorrt.so")
    assert {line.split()[-1] for line in lines.splitlines()} == {"getCreators", "setLoggerFinder"}


def test_library_asks_nothing_of_tensorrt(plugin_build: Path) -> None:
    library = plugin_build / "lib/libwmtp_tensorrt.so"
    names = output("nm", "-D", "-C", "--undefined-only", library)
    assert "nvinfer" not in names
    assert "getPluginRegistry" not in names
    assert "getLogger" not in names


def test_library_links_the_system_and_nothing_else(plugin_build: Path) -> None:
    dynamic = output("readelf", "-d", plugin_build / "lib/libwmtp_tensorrt.so")
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    names = {name.split(".so")[0] for name in needed}
    assert {name for name in names if not name.startswith("ld-linux")} <= SYSTEM_LIBRARIES


@pytest.mark.skipif(os.environ.get("TENSORRT_ROOT") is None, reason="no TENSORRT_ROOT")
def test_official_headers_are_the_ones_compiled(plugin_build: Path) -> None:
    cache = (plugin_build / "CMakeCache.txt").read_text()
    assert "WMTP_TENSORRT_INCLUDE:PATH=" in cache
