"""Every bad argument of an operator is refused before anything is written, with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tllm_wmtp import ops


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ring_arguments() -> dict[str, Any]:
    """Two requests with three and two rows on a ring of capacity 2 + 5 + 3."""
    return {
        "q": torch.randn(4, 4, 8),
        "k": torch.randn(5, 2, 8),
        "v": torch.randn(5, 2, 8),
        "ring_k": torch.zeros(3, 10, 2, 8),
        "ring_v": torch.zeros(3, 10, 2, 8),
        "row_offsets": int32(0, 3, 5),
        "query_offsets": int32(0, 2, 4),
        "start_positions": int64(4, 0),
        "lanes": int32(1, 0),
        "n_sink": 2,
        "window": 5,
        "scale": 0.5,
    }


def page_arguments() -> dict[str, Any]:
    return {
        "q": torch.randn(3, 4, 8),
        "k_pages": torch.zeros(4, 4, 2, 8),
        "v_pages": torch.zeros(4, 4, 2, 8),
        "block_table": int32(0, 1, 2, 3).reshape(2, 2),
        "query_offsets": int32(0, 2, 3),
        "query_positions": int64(5, 6, 1),
        "scale": 0.5,
    }


RING_ERRORS = [
    ("q", torch.randn(4, 4, 8).half(), "q is torch.float16.*float32 or bfloat16.*convert"),
    ("q", torch.randn(4, 4, 16)[..., ::2], "q is .*not contiguous"),
    ("q", torch.randn(4, 4, 16), r"q is .*must be of shape \(4, 4, 8\)"),
    ("q", torch.randn(4, 3, 8), "n_query_heads 3 is no multiple of n_kv_heads 2"),
    ("v", torch.randn(5, 2, 16), "v is .*like its partner"),
    ("ring_v", torch.zeros(3, 9, 2, 8), "V cache is .*like its partner"),
    ("row_offsets", int64(0, 3, 5), "row_offsets is torch.int64.*int32"),
    ("row_offsets", int32(0, 3, 4), "row_offsets ends at 4 but 5 rows"),
    ("row_offsets", int32(0, 6, 5), "row_offsets.2. is 5, less than the 6 before it"),
    ("row_offsets", int32(1, 3, 5), "row_offsets.0. is 1: must be 0"),
    ("query_offsets", int32(0, 4, 4), "request 0 asks for 4 queries but appends 3 rows"),
    ("start_positions", int64(4, -1), "start_positions.1. is -1: must be >= 0"),
    ("lanes", int32(1, 3), r"lanes.1. is 3: must lie in .0, 3\)"),
    ("lanes", int32(1, 1), "both 1: a lane belongs to one request"),
    ("n_sink", -1, "n_sink -1: must be >= 0"),
    ("n_sink", 10, "ring capacity 10 <= n_sink 10"),
    ("window", 0, "window 0: must be >= 1"),
    ("window", 9, r"ring capacity 10 < n_sink 2 \+ window 9"),
    ("window", 8, "request 0 has 2 queries but the ring spares 0 slots"),
    ("scale", 0.0, "scale 0.*must be positive"),
    ("scale", float("nan"), "scale nan.*must be positive"),
    ("ancestor_mask", torch.ones(4, 1), "ancestor_mask is torch.float32.*int32"),
    ("ancestor_mask", torch.zeros(4, 1, dtype=torch.int32), "ancestor_mask row 0 is empty"),
]


@pytest.mark.parametrize(("name", "value", "message"), RING_ERRORS)
def test_windowed_attention_refuses(name: str, value: Any, message: str) -> None:
    arguments = ring_arguments() | {name: value}
    before = arguments["ring_k"].clone()
    with pytest.raises(ValueError, match=message):
        ops.windowed_draft_attention(**arguments)
    assert torch.equal(arguments["ring_k"], before)


PAGE_ERRORS = [
    ("k_pages", torch.zeros(4, 4, 2, 8).double(), "k_pages is torch.float64"),
    ("block_table", int32(0, 1, 2, 4).reshape(2, 2), None),
    (
        "block_table",
        int32(0, 4, 2, 3).reshape(2, 2),
        r"block_table.0, 1. is 4: must lie in .0, 4\)",
    ),
    ("block_table", int32(0, 1), "block_table is .*one row per request"),
    ("query_positions", int64(5, 8, 1), "request 0 reaches position 8 but its block table has 2"),
    ("query_positions", int64(5, -6, 1), "query_positions.1. is -6: must be >= 0"),
    ("query_positions", int64(5, 6), "query_positions is .*of shape"),
    ("query_offsets", int32(0, 2), "query_offsets is .*of shape"),
]


@pytest.mark.parametrize(("name", "value", "message"), PAGE_ERRORS)
def test_full_attention_refuses(name: str, value: torch.Tensor, message: str | None) -> None:
    arguments = page_arguments() | {name: value}
    if message is None:  # a page beyond the last position may be anything
        assert torch.isfinite(ops.full_attention(**arguments)).all()
        return
    with pytest.raises(ValueError, match=message):
        ops.full_attention(**arguments)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask", "starts", "message"),
    [
        (ones(3, 1), None, "ancestor_mask without tree_starts: .*pass both for trees"),
        (None, int64(4, 1), "tree_starts without ancestor_mask: .*neither for chains"),
        (ones(2, 1), int64(4, 1), "ancestor_mask is .*int32 CPU tensor of shape .3, 1"),
        (ones(3), int64(4, 1), "ancestor_mask is .*queries, words"),
        (ones(3, 0), int64(4, 1), "ancestor_mask is .*queries, words"),
        (ones(3, 1).long(), int64(4, 1), "ancestor_mask is torch.int64.*int32"),
        (ones(3, 1), int32(4, 1), "tree_starts is torch.int32.*int64"),
        (ones(3, 1), int64(4), "tree_starts is .*of shape .2,"),
        (ones(3, 1), int64(4, -1), "tree_starts.1. is -1: must be >= 0"),
        (0 * ones(3, 1), int64(4, 1), "ancestor_mask row 0 is empty: .*set its bit"),
        (32 * ones(3, 1), int64(4, 1), "request 0 reaches position 9 but its block table has 2"),
    ],
)
def test_full_attention_refuses_trees(
    mask: torch.Tensor | None, starts: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.full_attention(**page_arguments(), ancestor_mask=mask, tree_starts=starts)


def test_odd_head_dim_is_refused() -> None:
    k = torch.zeros(1, 4, 1, 12)
    with pytest.raises(ValueError, match="head_dim 12: must be a positive multiple of 8"):
        ops.full_attention(
            torch.zeros(1, 1, 12), k, k, int32(0).reshape(1, 1), int32(0, 1), int64(1), 1.0
        )


def test_paged_append_needs_its_pages() -> None:
    rows, pages = torch.zeros(5, 1, 8), torch.zeros(2, 4, 1, 8)
    table = int32(0, -1).reshape(1, 2)
    with pytest.raises(ValueError, match="block_table.0, 1. is -1.*allocate the page"):
        ops.paged_append(rows, rows, pages, pages.clone(), table, int32(0, 5), int64(0))
    assert torch.equal(pages, torch.zeros_like(pages))


def move_arguments() -> dict[str, Any]:
    """Two requests with pages of four positions; three rows may move."""
    return {
        "k_pages": [torch.zeros(4, 4, 2, 8)],
        "v_pages": [torch.zeros(4, 4, 2, 8)],
        "block_table": int32(0, 1, 2, 3).reshape(2, 2),
        "starts": int64(2, 0),
        "source_rows": int64(0, 2, 5, 0, 1, 3).reshape(2, 3),
        "counts": int64(3, 2),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("v_pages", [torch.zeros(4, 5, 2, 8)], "pages is .*contiguous .pages, page_size"),
        ("k_pages", torch.zeros(4, 4, 2, 8), "pages is .*pass one per layer"),
        ("block_table", int64(0, 1, 2, 3).reshape(2, 2), "block_table is torch.int64.*int32"),
        ("block_table", int32(0, 4, 2, 3).reshape(2, 2), r"pages 0 to 4 .*must lie in \[0, 4\)"),
        ("starts", int64(3, 0), r"positions 0 and 8: all must lie in \[0, 8\)"),
        ("source_rows", int64(0, 2), "source_rows is .*torch.int64 .2, 2"),
        ("source_rows", int64(0, -3, 5, 0, 1, 3).reshape(2, 3), "positions -1 and 7"),
        ("counts", int64(4, 2), r"counts is \[4, 2\]: each must lie in \[0, 3\]"),
        ("counts", int32(3, 2), "counts is torch.int32.*torch.int64"),
    ],
)
def test_paged_move_refuses(name: str, value: Any, message: str) -> None:
    ops.paged_move(**move_arguments())
    with pytest.raises(ValueError, match=message):
        ops.paged_move(**(move_arguments() | {name: value}))


def delta_arguments() -> dict[str, torch.Tensor]:
    return {
        "q": torch.zeros(2, 3, 1, 8),
        "k": torch.zeros(2, 3, 1, 8),
        "v": torch.zeros(2, 3, 2, 16),
        "g": torch.zeros(2, 3, 2),
        "beta": torch.zeros(2, 3, 2),
        "state": torch.zeros(4, 2, 8, 16),
        "slots": int32(0, 3),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(2, 3, 1, 8).bfloat16(), "q is torch.bfloat16.*float32"),
        ("v", torch.zeros(2, 3, 2, 8), "v or delta is .*of shape"),
        ("g", torch.zeros(2, 3, 1), "g is .*of shape"),
        ("slots", int32(0, 4), r"slots.1. is 4: must lie in .0, 4\)"),
        ("slots", int32(3, 3), "both 3: a state belongs to one request"),
    ],
)
def test_gated_delta_refuses(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_rows(**(delta_arguments() | {name: value}))


def test_commit_refuses_rows_that_were_not_computed() -> None:
    x = delta_arguments()
    with pytest.raises(ValueError, match=r"counts.1. is 4: must lie in .0, 3."):
        ops.gated_delta_commit(x["k"], x["g"], x["v"], x["state"], x["slots"], int32(0, 4))


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="'sse9' is not built in.*choose one of scalar"):
        ops.set_isa("sse9")
    assert ops.current_isa() == ops.available_isas()[-1]
