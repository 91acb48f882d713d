"""The compilers that some tests need, and one way to build a CMake target with them.

A missing tool fails the test, with the remedy: a skipped build would pass for a verified one.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
#: One minor version of the CUDA compiler's packages: minors do not mix.
CUDA_PACKAGES = [
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "cuda-runtime", "cuda-crt", "nvvm", "cuda-cccl")
]


def script(path: str) -> Any:
    """A Python file outside the package, by its path from the root, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tool(name: str) -> str:
    """A program of this environment, else of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"no {name}: install the package's test extra, or {name} itself")
    return found


def nvcc() -> str:
    """The system's, this environment's, or one fetched into build/ (271 MB, once)."""
    found = shutil.which("nvcc")
    if found is not None:
        return found
    folder = REPOSITORY / "build/cuda-toolchain"
    for place in (*(Path(path) / "nvidia" for path in sys.path), folder / "nvidia"):
        for compiler in place.glob("cu*/bin/nvcc"):
            return str(compiler)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    result = subprocess.run([*command, *CUDA_PACKAGES], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"no nvcc, and {', '.join(CUDA_PACKAGES)} cannot be installed: install the CUDA "
            f"toolkit, or deselect these tests: "
            f'--ignore tests/unit/test_cuda_build.py -m "not trt"\n'
            f"{result.stderr[-1000:]}"
        )
    return str(next(folder.glob("nvidia/cu*/bin/nvcc")))


def build(folder: Path, target: str, *options: str) -> Path:
    """Configures ``folder`` (kept between runs) and builds ``target`` there, without a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    configure = [tool("cmake"), "-S", str(REPOSITORY), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DWMTP_PYTHON=OFF", *options]
    for command in (configure, [tool("cmake"), "--build", str(folder), "--target", target]):
        result = subprocess.run(command, capture_output=True, text=True)
        output = result.stdout[-4000:] + result.stderr[-4000:]
        assert result.returncode == 0, output
        assert "warning:" not in output, output
    return folder
