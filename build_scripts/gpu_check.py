"""Builds, tests and times the CUDA kernels on a machine with a GPU: ``make gpu-check``.

Needs that machine's Python with torch, its nvcc, and pytest for the tests; no network, and it
installs nothing. Everything ends up in one JSON file within eight minutes.

    python3 build_scripts/gpu_check.py --out gpu_check.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = REPOSITORY / "cpp/src/cuda"
LIBRARY = REPOSITORY / "build/cuda/lib/libwmtp_cuda.so"
BUDGET_S = 8 * 60
NO_GPU = 2


def bare_packages() -> None:
    """Makes ``tllm_wmtp.ops.cuda`` and ``tllm_wmtp.bench.cuda_attention`` importable where the
    package's native module has not been built: its ``__init__`` files are left out."""
    for name in ("tllm_wmtp", "tllm_wmtp.ops", "tllm_wmtp.bench"):
        module = types.ModuleType(name)
        module.__path__ = [str(REPOSITORY / name.replace(".", "/"))]
        sys.modules[name] = module


def target_of(capability: tuple[int, int]) -> str:
    """nvcc's name of a compute capability, architecture-specific instructions included."""
    major, minor = capability
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def nvcc_path() -> str:
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        raise FileNotFoundError("no nvcc on PATH or in /usr/local/cuda/bin: install the toolkit")
    return found


def build_command(nvcc: str, target: str, library: Path = LIBRARY) -> list[str]:
    """One call for all sources, for the one target at hand. No CMake is needed."""
    flags = ["-shared", "-std=c++17", "-O3", "--threads", str(os.cpu_count() or 1)]
    flags += ["-gencode", f"arch=compute_{target},code=sm_{target}", "-cudart", "static"]
    flags += ["-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
    flags += [f"-I{REPOSITORY / 'cpp/include'}", "-o", str(library)]
    sources = sorted(str(path) for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cpp")))
    return [nvcc, *flags, *sources]


def build(target: str) -> dict[str, Any]:
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    result = subprocess.run(
        build_command(nvcc_path(), target), capture_output=True, text=True, timeout=BUDGET_S
    )
    if result.returncode != 0:
        raise RuntimeError(f"nvcc failed:\n{result.stdout}{result.stderr}")
    return {"target": f"sm_{target}", "seconds": round(time.monotonic() - begin, 1)}


def run_tests(selection: str, limit_s: float) -> dict[str, Any]:
    """``tests/gpu`` in a process of its own; a test that hangs costs no more than ``limit_s``."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["-k", selection, str(REPOSITORY / "tests/gpu")]
    begin = time.monotonic()
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=max(limit_s, 1), cwd=REPOSITORY
        )
        code, text = result.returncode, result.stdout + result.stderr
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        code, text = -1, output.decode() if isinstance(output, bytes) else output
    lines = text.strip().splitlines()
    return {
        "selection": selection,
        "passed": code == 0,
        "exit_code": code,
        "seconds": round(time.monotonic() - begin, 1),
        "last_line": lines[-1] if lines else "",
        "failures": [line for line in lines if line.startswith(("FAILED", "ERROR"))][:50],
        "tail": [] if code == 0 else lines[-60:],
    }


def describe(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", 0),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build/gpu_check.json")
    arguments = parser.parse_args()
    begin = time.monotonic()

    def left() -> float:
        return BUDGET_S - (time.monotonic() - begin)

    try:
        import torch
    except ImportError:
        print("no torch in this Python: run the check with the Python that has it")
        return NO_GPU
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return NO_GPU

    result: dict[str, Any] = describe(torch)

    def write() -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    result["build"] = build(target_of(torch.cuda.get_device_capability(0)))
    print("built", result["build"], flush=True)
    write()
    result["tests"] = run_tests("not sanitizer", min(180.0, left() - 150))
    print("tests", result["tests"]["last_line"], flush=True)
    write()
    bare_packages()
    ops = importlib.import_module("tllm_wmtp.ops.cuda").CudaOps(LIBRARY)
    bench = importlib.import_module("tllm_wmtp.bench.cuda_attention")
    seconds = max(20.0, min(150.0, left() - 60))
    result["bench"] = bench.measure(ops, bench.Setup(seconds=seconds))
    result["goals"] = bench.goals(result["bench"]["rows"])
    write()
    torch.cuda.empty_cache()
    if left() > 40:
        result["sanitizer"] = run_tests("sanitizer", left() - 10)
        print("sanitizer", result["sanitizer"]["last_line"], flush=True)
    result["seconds"] = round(time.monotonic() - begin, 1)
    write()
    for goal in result["goals"]:
        print(goal)
    print(f"wrote {arguments.out} after {result['seconds']} s")
    return 0 if result["tests"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
