"""Registers, shared memory and spills of every CUDA kernel, from what ptxas said at build time.

python build_scripts/cuda_resources.py build/cuda            prints the table
python build_scripts/cuda_resources.py build/cuda --write    renews docs/cuda_resources.md
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

REPORT = Path(__file__).resolve().parents[1] / "docs/cuda_resources.md"
TYPES = {0: "fp32", 1: "bf16", 2: "fp16"}

HEADER = """# Registers and spills of the CUDA kernels

Written by `build_scripts/cuda_resources.py` from `nvcc {version}`; a test compares. No kernel ran
for this page: these are the compiler's numbers. Shared memory is in bytes per block of 128 threads.

| kernel | target | registers | shared memory | stack | spilled bytes |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Resources:
    """What one kernel needs on one target; memory in bytes."""

    kernel: str
    target: str
    registers: int
    shared: int
    stack: int
    spilled: int

    def row(self) -> str:
        cells = (self.kernel, self.target, self.registers, self.shared, self.stack, self.spilled)
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


def kernel_name(mangled: str) -> str:
    """A short name from the mangled one of ``entry<Kernel>``."""
    tensor_core = re.search(r"AttendTensorCoreILi(\d+)ELNS\w*?5DTypeE(\d)ELb([01])E", mangled)
    if tensor_core:
        dim, row, cache_8 = tensor_core.groups()
        row_type = TYPES[int(row)]
        return f"attend {row_type}, cache {'e4m3' if cache_8 == '1' else row_type}, head {dim}"
    delta = re.search(r"GatedDeltaILb([01])E", mangled)
    if delta:
        return "gated delta commit" if delta.group(1) == "1" else "gated delta rows"
    for part, name in (
        ("AttendSimple", "attend simple"),
        ("MergeSplits", "merge splits"),
        ("AppendRowsKernel", "append rows"),
    ):
        if part in mangled:
            return name
    raise ValueError(f"kernel {mangled} has no name here: add one")


def parse(text: str) -> list[Resources]:
    """The kernels in one log of ``nvcc -Xptxas=-v``."""
    found = []
    for block in text.split("Compiling entry function '")[1:]:
        mangled, target = re.match(r"([^']+)' for '([^']+)'", block).groups()  # type: ignore[union-attr]
        stack, stores, loads = (
            int(number)
            for number in re.search(  # type: ignore[union-attr]
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
            ).groups()
        )
        registers = re.search(r"Used (\d+) registers", block)
        shared = re.search(r"(\d+) bytes smem", block)
        if registers is None:
            raise ValueError(f"ptxas says nothing of the registers of {mangled}")
        found.append(
            Resources(
                kernel_name(mangled),
                target,
                int(registers.group(1)),
                int(shared.group(1)) if shared else 0,
                stack,
                stores + loads,
            )
        )
    return found


def read(build: Path) -> list[Resources]:
    """All kernels of a build folder.

    Raises:
        FileNotFoundError: the folder holds no compiler logs.
    """
    logs = sorted(build.glob("cpp/src/cuda/*.o.txt"))
    if not logs:
        raise FileNotFoundError(f"{build} holds no logs of nvcc: build wmtp_cuda there first")
    return sorted(kernel for log in logs for kernel in parse(log.read_text()))


def report(kernels: list[Resources], version: str) -> str:
    return HEADER.format(version=version) + "\n".join(kernel.row() for kernel in kernels) + "\n"


def recorded() -> tuple[str, list[str]]:
    """Version of nvcc and table rows of the report that is checked in."""
    text = REPORT.read_text()
    version = re.search(r"`nvcc ([^`]+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and " sm_" in line]
    return version.group(1) if version else "", rows


def nvcc_version(build: Path) -> str:
    """Version of the compiler that a build folder uses."""
    import subprocess

    cache = (build / "CMakeCache.txt").read_text()
    nvcc = re.search(r"WMTP_NVCC:\w+=(.+)", cache)
    if nvcc is None:
        raise ValueError(f"{build} was not configured with WMTP_CUDA")
    text = subprocess.run([nvcc.group(1), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"V(\d+\.\d+\.\d+)", text)
    return version.group(1) if version else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("build", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = report(read(arguments.build), nvcc_version(arguments.build))
    if arguments.write:
        REPORT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
