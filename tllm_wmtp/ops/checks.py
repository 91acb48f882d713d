"""Checks of tensor arguments. They run on every call, so the passing path stays a few compares."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
#: kMaxHeadDim of cpp/src/cuda/check.cpp.
CUDA_MAX_HEAD_DIM = 256


def fail(name: str, tensor: torch.Tensor, rule: str, remedy: str) -> None:
    """Raise the error for a tensor that breaks ``rule``."""
    raise ValueError(
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        f"{'' if tensor.is_contiguous() else ', not contiguous'}: must be {rule}; {remedy}"
    )


def value_code(name: str, tensor: torch.Tensor, n_dims: int) -> int:
    """Dtype code of a dense float32 or bfloat16 CPU tensor."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None or tensor.dim() != n_dims or not tensor.is_contiguous() or not tensor.is_cpu:
        fail(
            name,
            tensor,
            f"a contiguous {n_dims}-d float32 or bfloat16 CPU tensor",
            "convert it with .to(dtype).contiguous()",
        )
    assert code is not None
    return code


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """The tensor has exactly this shape."""
    if tensor.shape != shape:
        fail(name, tensor, f"of shape {tuple(shape)}", "pass tensors of one batch and one model")


def check_dense(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The tensor is dense, on the CPU, and has this dtype and shape (a tuple compares fastest)."""
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or not tensor.is_contiguous()
        or not tensor.is_cpu
    ):
        fail(
            name,
            tensor,
            f"a contiguous {dtype} CPU tensor of shape {tuple(shape)}",
            "convert it with .to(dtype).contiguous()",
        )


def check_tree_rows(mask: torch.Tensor | None, starts: torch.Tensor | None) -> None:
    """The mask of a verify's tree rows comes with the positions that its bits count from."""
    if (mask is None) != (starts is None):
        given = "tree_starts" if mask is None else "ancestor_mask"
        missing = "ancestor_mask" if mask is None else "tree_starts"
        raise ValueError(
            f"{given} without {missing}: a mask's bits count from each request's tree start; "
            "pass both for trees, neither for chains"
        )


def check_pair(names: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """K and V agree in dtype, shape and layout."""
    if (
        first.dtype != second.dtype
        or first.shape != second.shape
        or not second.is_contiguous()
        or not second.is_cpu
    ):
        fail(
            names,
            second,
            f"like its partner, {first.dtype} {tuple(first.shape)} and contiguous",
            "allocate K and V alike",
        )
