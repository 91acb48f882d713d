"""CPU and CUDA operators, registered with torch as ``wmtp::*``; a tensor's device chooses.

Each function here calls the registered operator, so the same name works eagerly, under
``torch.compile`` and in an exported graph. Importing this module loads the native library and
registers the operators.
"""

from __future__ import annotations

import torch

from tllm_wmtp import _core
from tllm_wmtp.ops import cuda as _cuda
from tllm_wmtp.ops import registration as _registration
from tllm_wmtp.ops.paged_move import paged_move

_cuda.register()

_OPS = torch.ops.wmtp

ring_append = _OPS.ring_append.default
windowed_draft_attention = _OPS.windowed_draft_attention.default
paged_append = _OPS.paged_append.default
full_attention = _OPS.full_attention.default
gated_delta_rows = _OPS.gated_delta_rows.default
gated_delta_commit = _OPS.gated_delta_commit.default

SCHEMAS = _registration.SCHEMAS

__all__ = [
    "SCHEMAS",
    "advise_huge_pages",
    "available_isas",
    "current_isa",
    "full_attention",
    "gated_delta_commit",
    "gated_delta_rows",
    "paged_append",
    "paged_move",
    "ring_append",
    "set_isa",
    "windowed_draft_attention",
]


def available_isas() -> list[str]:
    """Instruction sets this processor runs, slowest first."""
    return list(_core.available_isas())


def current_isa() -> str:
    """Instruction set the next call uses."""
    return str(_core.current_isa())


def set_isa(name: str) -> None:
    """Use one of :func:`available_isas`, or ``"auto"`` for the fastest. Meant for tests."""
    _core.set_isa(name)


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages under a large tensor; False where the system does not offer them.

    Call it on a pool right after ``torch.empty``, before the first write: only memory that is not
    yet backed by small pages gains. It takes the address-translation misses out of a long read.
    """
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return bool(_core.advise_huge_pages(storage.data_ptr(), storage.nbytes()))
