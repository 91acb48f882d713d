"""Compaction of an accepted path: its keys and values move to the positions they now have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tllm_wmtp.ops.checks import fail


def paged_move(
    k_pages: Sequence[torch.Tensor],
    v_pages: Sequence[torch.Tensor],
    block_table: torch.Tensor,
    starts: torch.Tensor,
    source_rows: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Moves position ``starts[b] + source_rows[b, t]`` to ``starts[b] + t`` for ``t < counts[b]``.

    All rows are read before any is written. Cells of other positions keep what they hold. On a CPU
    the numbers are checked; elsewhere looking would synchronise, and they are assumed.

    Args:
        k_pages, v_pages: one tensor ``[pages, page_size, Hkv, D]`` per layer, updated in place; a
            page number means the same tokens in all of them.
        block_table: int32 ``[B, max_pages]``.
        starts: int64 ``[B]``, position of each request's row 0, whose page exists.
        source_rows: int64 ``[B, d]``, :func:`tllm_wmtp.tree.path_to`'s rows; what lies past a
            request's count is not looked at.
        counts: int64 ``[B]``, 0 .. d.

    Raises:
        ValueError: a tensor has another type or shape, or a number points outside the pages.
    """
    layers = (*k_pages, *v_pages)
    for pages in layers:
        if pages.dim() != 4 or not pages.is_contiguous() or pages.shape[:2] != layers[0].shape[:2]:
            fail("pages", pages, "contiguous [pages, page_size, Hkv, D]", "pass one per layer")
    for name, tensor, dtype, shape in (
        ("block_table", block_table, torch.int32, (starts.shape[0], block_table.shape[-1])),
        ("starts", starts, torch.int64, (starts.numel(),)),
        ("source_rows", source_rows, torch.int64, (starts.shape[0], source_rows.shape[-1])),
        ("counts", counts, torch.int64, (starts.shape[0],)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            fail(name, tensor, f"{dtype} {shape}", "pass one entry per request")
    if not layers or source_rows.numel() == 0:
        return
    page_size = layers[0].shape[1]
    order = torch.arange(source_rows.shape[1], device=starts.device)
    moved = order < counts[:, None]
    # What is not moved repeats the move of row 0, so that no two writes to a cell differ; a request
    # that keeps nothing moves its row 0 onto itself.
    target = torch.where(moved, order, 0)
    source = torch.where(moved, source_rows, torch.where(moved[:, :1], source_rows[:, :1], 0))
    positions = torch.stack((source, target)) + starts[:, None]
    if starts.device.type == "cpu":
        _check(layers[0], block_table, positions, counts, source_rows.shape[1])
    page = (positions // page_size).flatten(2)
    table = block_table.long().expand(2, -1, -1)
    cells = table.gather(2, page) * page_size + positions % page_size
    from_cells, to_cells = cells.flatten(1)
    for pages in layers:
        rows = pages.view(-1, pages.shape[2] * pages.shape[3])
        if rows.dtype.itemsize == 1:
            rows = rows.view(torch.uint8)  # indexing knows no 8-bit floats
        rows[to_cells] = rows[from_cells]


def _check(
    pages: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    n_rows: int,
) -> None:
    """What the numbers say is possible."""
    if not bool(((counts >= 0) & (counts <= n_rows)).all()):
        raise ValueError(
            f"counts is {counts.tolist()}: each must lie in [0, {n_rows}]; "
            "only rows that were verified can be kept"
        )
    n_pages, page_size = pages.shape[:2]
    last = block_table.shape[1] * page_size
    if not bool(((positions >= 0) & (positions < last)).all()):
        raise ValueError(
            f"a row moves between positions {int(positions.min())} and {int(positions.max())}: all "
            f"must lie in [0, {last}), the block table's; pass the rows of an accepted path"
        )
    used = block_table.long().expand(2, -1, -1).gather(2, positions // page_size)
    if not bool(((used >= 0) & (used < n_pages)).all()):
        raise ValueError(
            f"block_table names pages {int(used.min())} to {int(used.max())} for the moved rows: "
            f"each must lie in [0, {n_pages}); allocate the page first"
        )
