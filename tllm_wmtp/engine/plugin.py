"""Where the TensorRT plugin is, and how a TensorRT module gets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tllm_wmtp.errors import WmtpError

LIBRARY = "libwmtp_tensorrt.so"
NAME, NAMESPACE, VERSION = "WindowedDraftAttention", "wmtp", "1"


class PluginMissing(WmtpError):
    """The plugin library has not been built, or TensorRT does not take it."""


def find_plugin() -> Path:
    """The library beside the package, else in the checkout's ``build/cuda``.

    Raises:
        PluginMissing: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    places = [package / LIBRARY, package.parent / "build/cuda/lib" / LIBRARY]
    for place in places:
        if place.exists():
            return place
    raise PluginMissing(
        f"{LIBRARY} is not in {' or '.join(str(place.parent) for place in places)}",
        "an engine with windowed attention needs it",
        "run `make engine-tools` in the checkout, or `cmake -S . -B build/cuda -DWMTP_PYTHON=OFF "
        "-DWMTP_CUDA=ON -DWMTP_TENSORRT=ON && cmake --build build/cuda --target wmtp_tensorrt`",
    )


def load_plugin(tensorrt: Any, library: Path | None = None) -> Path:
    """Registers the plugin with ``tensorrt``: the module ``tensorrt``, or one of its relatives
    (``tensorrt_lean``, ``tensorrt_dispatch``, ``tensorrt_rtx``). Loading it again does nothing.

    Raises:
        PluginMissing: no library, or the module refuses it.
    """
    path = find_plugin() if library is None else library
    registry = tensorrt.get_plugin_registry()
    # Asking for a creator that is not there would make TensorRT log an error.
    known = [(one.name, one.plugin_namespace) for one in registry.all_creators]
    if (NAME, NAMESPACE) in known:
        return path
    if registry.load_library(str(path)) is None:
        raise PluginMissing(
            f"{tensorrt.__name__} refuses {path}",
            "it takes libraries of its own architecture, from version 10.3 on",
            "read its log and build the plugin on this machine",
        )
    return path
