"""Which libraries compile a graph, where they are, and what they can compile for."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError, WmtpError

#: The first version whose ONNX parser finds plugins of the IPluginV3 kind.
RTX_VERSION = "1.7.1.116"
RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
#: FP4 matrix products need these.
FP4_TARGETS = ("sm100", "sm103", "sm110", "sm120", "sm121")


class BuildError(WmtpError):
    """A builder refused a graph."""


@dataclass(frozen=True)
class Backend:
    """A builder in reach. ``target`` is None where it builds for the GPU at hand only."""

    name: str
    module: str
    version: str
    environment: dict[str, str]
    target: str | None


def find_backend(name: str, target: str, links: Path) -> Backend:
    """The backend ``rtx`` or ``tensorrt`` for a ``target`` such as ``sm120``.

    Args:
        links: a folder for a link that TensorRT-RTX's parser needs.

    Raises:
        ConfigError: it is not installed, or cannot build for this target here.
    """
    return _find_rtx(target, links) if name == "rtx" else _find_tensorrt(target)


def _find_rtx(target: str, links: Path) -> Backend:
    if target not in RTX_TARGETS:
        raise ConfigError(
            f"target {target!r}",
            f"TensorRT-RTX compiles for {', '.join(RTX_TARGETS)}",
            "use one of these, or --backend tensorrt on a machine with that GPU",
        )
    folder = rtx_folder()
    library = folder / "tensorrt_rtx_libs/libtensorrt_rtx.so.1"
    wheels = sorted(folder.glob("tensorrt_rtx_cu*_libs-*.dist-info"))
    if not library.exists() or not wheels:
        raise ConfigError(
            f"TensorRT-RTX in {folder}",
            "its bindings are there, its libraries (tensorrt-rtx-cu13-libs) are not",
            "run `make engine-tools` in a checkout, or pip install 'tllm-wmtp[rtx]' (about 100 MB)",
        )
    # The parser opens the library by a name that the wheel does not carry.
    links.mkdir(parents=True, exist_ok=True)
    link = links / "libtensorrt_rtx.so"
    if not link.exists() or link.resolve() != library.resolve():
        fresh = links / f".{os.getpid()}.so"
        fresh.symlink_to(library.resolve())
        fresh.replace(link)
    version = wheels[0].stem.split("-")[1]
    environment = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(links)}
    return Backend("rtx", "tensorrt_rtx_bindings", version, environment, target)


def rtx_folder() -> Path:
    """Where its wheels lie: this environment, else the checkout's build folder."""
    found = importlib.util.find_spec("tensorrt_rtx_bindings")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    checkout = Path(__file__).resolve().parents[2] / "build/trt-libraries" / f"rtx-{RTX_VERSION}"
    if (checkout / "installed").exists():
        return checkout
    raise ConfigError(
        "backend 'rtx'",
        f"it needs TensorRT-RTX {RTX_VERSION}, which is not installed",
        "run `make engine-tools` in a checkout, or pip install 'tllm-wmtp[rtx]' (about 100 MB)",
    )


def _find_tensorrt(target: str) -> Backend:
    remedy = "use --backend rtx to compile ahead of time, or run this on a machine with the GPU"
    if importlib.util.find_spec("tensorrt") is None:
        raise ConfigError(
            "backend 'tensorrt'",
            "it needs the tensorrt package, 10.14 or later, which is not installed",
            remedy,
        )
    at_hand = gpu_target()
    if at_hand is None:
        raise ConfigError(
            "backend 'tensorrt'", "it builds on the GPU itself, and there is none here", remedy
        )
    if at_hand != target:
        raise ConfigError(
            f"target {target!r}", f"TensorRT builds for the GPU at hand, {at_hand}", remedy
        )
    from importlib.metadata import version

    return Backend("tensorrt", "tensorrt", version("tensorrt"), {}, None)


def gpu_target() -> str | None:
    """``sm120`` and the like of the first GPU; None without a driver or a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, number = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    numbers = []
    for attribute in (75, 76):  # compute capability, major and minor
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) != 0:
            return None
        numbers.append(number.value)
    return f"sm{numbers[0]}{numbers[1]}"


def compile_graph(backend: Backend, request: dict[str, Any]) -> dict[str, Any]:
    """Runs :mod:`tllm_wmtp.engine.compile_worker`; what it answered.

    Raises:
        BuildError: the library refused the graph, or died.
    """
    environment = dict(os.environ)
    for name, value in backend.environment.items():
        environment[name] = os.pathsep.join(filter(None, [value, environment.get(name)]))
    request = {**request, "module": backend.module, "target": backend.target}
    result = subprocess.run(
        [sys.executable, "-m", "tllm_wmtp.engine.compile_worker"],
        input=json.dumps(request),
        env=environment,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"{backend.name} {backend.version}",
            f"its builder ended with code {result.returncode}: {last}",
            "report it with the options of the build",
        )
    answer: dict[str, Any] = json.loads(result.stdout)
    if answer["step"] != "done":
        said = " | ".join([*answer["errors"][:3], *result.stderr.strip().splitlines()[:3]])
        said = " ".join(said.split())
        raise BuildError(
            f"{backend.name} {backend.version} at step '{answer['step']}'",
            f"the graph must be one that it takes: {said}",
            "try another target or --weights bf16",
        )
    return answer
