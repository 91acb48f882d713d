"""TensorRT libraries that PyPI really carries, each in a folder of its own under build/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from toolchain import REPOSITORY

FOLDER = REPOSITORY / "build/trt-libraries"


@dataclass(frozen=True)
class Package:
    """Wheels of one version, installed without their dependencies."""

    name: str
    wheels: tuple[str, ...]
    version: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.name}-{self.version}"

    def install(self) -> Path:
        """The folder with the wheels in it, fetched once; a clear error where PyPI is away."""
        done = self.folder / "installed"
        if done.exists():
            return self.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        pins = [f"{wheel}=={self.version}" for wheel in self.wheels]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(self.folder), *pins]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(
                f"{', '.join(pins)} cannot be installed: these tests need PyPI once; connect, or "
                f'deselect them with -m "not trt".\n{result.stderr[-1000:]}'
            )
        done.touch()
        return self.folder


DISPATCH = tuple(
    Package("dispatch", ("tensorrt-dispatch-cu13-libs",), version)
    for version in ("10.16.1.11", "11.4.0.106")
)
# The first version whose ONNX parser finds plugins of the IPluginV3 kind.
RTX = Package("rtx", ("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"), "1.7.1.116")


def dispatch_library(package: Package) -> Path:
    major = package.version.split(".")[0]
    return package.install() / f"tensorrt_dispatch_libs/libnvinfer_dispatch.so.{major}"


def rtx_environment() -> dict[str, str]:
    """Where a process finds TensorRT-RTX. Its ONNX parser opens the library by a name that the
    wheel does not carry, hence the link; ``tensorrt_rtx`` itself comes as a source package that
    only re-exports the bindings, hence the module."""
    folder = RTX.install()
    links, module = folder / "links", folder / "tensorrt_rtx.py"
    links.mkdir(exist_ok=True)
    link = links / "libtensorrt_rtx.so"
    if not link.exists():
        link.symlink_to(folder / "tensorrt_rtx_libs/libtensorrt_rtx.so.1")
    module.write_text("from tensorrt_rtx_bindings import *\n")
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(links)}
