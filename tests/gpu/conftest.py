"""Where the kernels come from: the built package, or the two files that need torch only."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))


def cuda_module() -> Any:
    """``tllm_wmtp.ops.cuda``; without the package's own native module, as a file on its own."""
    try:
        return importlib.import_module("tllm_wmtp.ops.cuda")
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == "tllm_wmtp"]:
            del sys.modules[name]
        for name in ("tllm_wmtp", "tllm_wmtp.ops"):
            bare = types.ModuleType(name)
            bare.__path__ = [str(REPOSITORY / name.replace(".", "/"))]
            sys.modules[name] = bare
        return importlib.import_module("tllm_wmtp.ops.cuda")


@pytest.fixture(scope="session")
def cuda_ops() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    module = cuda_module()
    try:
        return module.loaded()
    except module.LibraryMissing as missing:
        pytest.skip(str(missing))
