"""Operator schemas, their CPU bodies and their shape functions.

A body checks dtypes, shapes and layouts, allocates the result and passes addresses on; the native
side checks what the integers say. ``torch.library.Library`` is used directly: a call costs a few
microseconds where ``custom_op`` costs tens. An address takes 0.1 us to pass on, a DLPack capsule
2 us, and a call has up to eleven tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch first: it brings the OpenMP runtime that the native library then shares.
from tllm_wmtp import _core
from tllm_wmtp.ops.checks import (
    check_dense,
    check_pair,
    check_shape,
    check_tree_rows,
    fail,
    value_code,
)

SCHEMAS = {
    "ring_append": (
        "(Tensor k, Tensor v, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor row_offsets, "
        "Tensor start_positions, Tensor lanes, int n_sink) -> ()"
    ),
    "windowed_draft_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor row_offsets, "
        "Tensor query_offsets, Tensor start_positions, Tensor lanes, int n_sink, int window, "
        "float scale, Tensor? ancestor_mask=None) -> Tensor"
    ),
    "paged_append": (
        "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, "
        "Tensor row_offsets, Tensor start_positions) -> ()"
    ),
    "full_attention": (
        "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor query_offsets, "
        "Tensor query_positions, float scale, Tensor? ancestor_mask=None, "
        "Tensor? tree_starts=None) -> Tensor"
    ),
    "gated_delta_rows": (
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor slots) "
        "-> (Tensor out, Tensor delta)"
    ),
    "gated_delta_commit": (
        "(Tensor k, Tensor g, Tensor delta, Tensor(a!) state, Tensor slots, Tensor counts) -> ()"
    ),
}

_LIBRARY = torch.library.Library("wmtp", "DEF")


def _check_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> tuple[int, int, int]:
    """Dtype codes of the rows and of the cache, and the number of requests."""
    row_code = value_code("k", k, 3)
    check_pair("v", k, v)
    cache_code = value_code("K cache", cache_k, 4)
    check_pair("V cache", cache_k, cache_v)
    if cache_k.shape[2:] != k.shape[1:]:
        fail(
            "k", k, f"[rows, {cache_k.shape[2]}, {cache_k.shape[3]}] like the cache", "match heads"
        )
    n_requests = start_positions.shape[0] if start_positions.dim() == 1 else 0
    check_dense("start_positions", start_positions, torch.int64, (n_requests,))
    check_dense("row_offsets", row_offsets, torch.int32, (n_requests + 1,))
    return row_code, cache_code, n_requests


def _mask(ancestor_mask: torch.Tensor, n_queries: int) -> tuple[int, int]:
    """Address and words per row of an ancestor mask."""
    words = ancestor_mask.shape[-1] if ancestor_mask.dim() == 2 else 0
    if words == 0:
        fail("ancestor_mask", ancestor_mask, "[queries, words] int32", "pass ceil(rows / 32) words")
    check_dense("ancestor_mask", ancestor_mask, torch.int32, (n_queries, words))
    return ancestor_mask.data_ptr(), words


def _ring_append(
    k: torch.Tensor,
    v: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    lanes: torch.Tensor,
    n_sink: int,
) -> None:
    row_code, ring_code, n_requests = _check_rows(
        k, v, ring_k, ring_v, row_offsets, start_positions
    )
    check_dense("lanes", lanes, torch.int32, (n_requests,))
    n_lanes, capacity, n_kv_heads, head_dim = ring_k.shape
    _core.ring_append(
        k.data_ptr(),
        v.data_ptr(),
        row_code,
        row_offsets.data_ptr(),
        n_requests,
        k.shape[0],
        start_positions.data_ptr(),
        n_kv_heads,
        head_dim,
        ring_k.data_ptr(),
        ring_v.data_ptr(),
        ring_code,
        n_lanes,
        capacity,
        n_sink,
        lanes.data_ptr(),
        torch.get_num_threads(),
    )


def _windowed_draft_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    row_offsets: torch.Tensor,
    query_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    lanes: torch.Tensor,
    n_sink: int,
    window: int,
    scale: float,
    ancestor_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    row_code, ring_code, n_requests = _check_rows(
        k, v, ring_k, ring_v, row_offsets, start_positions
    )
    check_dense("lanes", lanes, torch.int32, (n_requests,))
    check_dense("query_offsets", query_offsets, torch.int32, (n_requests + 1,))
    n_lanes, capacity, n_kv_heads, head_dim = ring_k.shape
    q_code = value_code("q", q, 3)
    n_queries, n_query_heads, q_dim = q.shape
    if q_dim != head_dim:
        check_shape("q", q, (n_queries, n_query_heads, head_dim))
    mask_address = mask_words = 0
    if ancestor_mask is not None:
        mask_address, mask_words = _mask(ancestor_mask, n_queries)
    out = torch.empty_like(q)
    _core.windowed_draft_attention(
        q.data_ptr(),
        q_code,
        query_offsets.data_ptr(),
        n_queries,
        n_query_heads,
        k.data_ptr(),
        v.data_ptr(),
        row_code,
        row_offsets.data_ptr(),
        n_requests,
        k.shape[0],
        start_positions.data_ptr(),
        n_kv_heads,
        head_dim,
        ring_k.data_ptr(),
        ring_v.data_ptr(),
        ring_code,
        n_lanes,
        capacity,
        n_sink,
        lanes.data_ptr(),
        window,
        scale,
        mask_address,
        mask_words,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _paged_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> None:
    row_code, page_code, n_requests = _check_rows(
        k, v, k_pages, v_pages, row_offsets, start_positions
    )
    max_pages = block_table.shape[-1]
    check_dense("block_table", block_table, torch.int32, (n_requests, max_pages))
    n_pages, page_size, n_kv_heads, head_dim = k_pages.shape
    _core.paged_append(
        k.data_ptr(),
        v.data_ptr(),
        row_code,
        row_offsets.data_ptr(),
        n_requests,
        k.shape[0],
        start_positions.data_ptr(),
        n_kv_heads,
        head_dim,
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        page_code,
        n_pages,
        page_size,
        block_table.data_ptr(),
        max_pages,
        torch.get_num_threads(),
    )


def _full_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    query_offsets: torch.Tensor,
    query_positions: torch.Tensor,
    scale: float,
    ancestor_mask: torch.Tensor | None = None,
    tree_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    q_code = value_code("q", q, 3)
    page_code = value_code("k_pages", k_pages, 4)
    check_pair("v_pages", k_pages, v_pages)
    n_queries, n_query_heads, q_dim = q.shape
    n_pages, page_size, n_kv_heads, head_dim = k_pages.shape
    if q_dim != head_dim:
        check_shape("q", q, (n_queries, n_query_heads, head_dim))
    if block_table.dim() != 2:
        fail("block_table", block_table, "[requests, max_pages] int32", "pass one row per request")
    n_requests, max_pages = block_table.shape
    check_dense("block_table", block_table, torch.int32, (n_requests, max_pages))
    check_dense("query_offsets", query_offsets, torch.int32, (n_requests + 1,))
    check_dense("query_positions", query_positions, torch.int64, (n_queries,))
    check_tree_rows(ancestor_mask, tree_starts)
    mask_address = mask_words = starts_address = 0
    if ancestor_mask is not None and tree_starts is not None:
        mask_address, mask_words = _mask(ancestor_mask, n_queries)
        check_dense("tree_starts", tree_starts, torch.int64, (n_requests,))
        starts_address = tree_starts.data_ptr()
    out = torch.empty_like(q)
    _core.full_attention(
        q.data_ptr(),
        q_code,
        query_offsets.data_ptr(),
        n_requests,
        n_queries,
        query_positions.data_ptr(),
        n_query_heads,
        n_kv_heads,
        head_dim,
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        page_code,
        n_pages,
        page_size,
        block_table.data_ptr(),
        max_pages,
        scale,
        mask_address,
        mask_words,
        starts_address,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _gated_delta_shapes(
    k: torch.Tensor, g: torch.Tensor, delta: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
) -> tuple[int, int, int, int, int, int, int]:
    """Checks what rows and commit have in common: (B, T, Hk, Hv, Dk, Dv, slots)."""
    for name, tensor in (("k", k), ("v or delta", delta), ("state", state)):
        if tensor.dim() != 4:
            fail(name, tensor, "a 4-d float32 tensor", "pass [B, T, heads, dim]")
    n_requests, n_rows, n_key_heads, key_dim = k.shape
    n_slots, n_value_heads, _, value_dim = state.shape
    check_dense("k", k, torch.float32, (n_requests, n_rows, n_key_heads, key_dim))
    check_dense("state", state, torch.float32, (n_slots, n_value_heads, key_dim, value_dim))
    check_dense("g", g, torch.float32, (n_requests, n_rows, n_value_heads))
    check_dense("v or delta", delta, torch.float32, (n_requests, n_rows, n_value_heads, value_dim))
    check_dense("slots", slots, torch.int32, (n_requests,))
    return n_requests, n_rows, n_key_heads, n_value_heads, key_dim, value_dim, n_slots


def _gated_delta_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = _gated_delta_shapes(k, g, v, state, slots)
    check_dense("q", q, torch.float32, k.shape)
    check_dense("beta", beta, torch.float32, g.shape)
    out = torch.empty_like(v)
    delta = torch.empty_like(v)
    _core.gated_delta_rows(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
        state.data_ptr(),
        slots.data_ptr(),
        *shapes,
        out.data_ptr(),
        delta.data_ptr(),
        torch.get_num_threads(),
    )
    return out, delta


def _gated_delta_commit(
    k: torch.Tensor,
    g: torch.Tensor,
    delta: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    shapes = _gated_delta_shapes(k, g, delta, state, slots)
    check_dense("counts", counts, torch.int32, slots.shape)
    _core.gated_delta_commit(
        k.data_ptr(),
        g.data_ptr(),
        delta.data_ptr(),
        state.data_ptr(),
        slots.data_ptr(),
        counts.data_ptr(),
        *shapes,
        torch.get_num_threads(),
    )


def _fake_nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _fake_like_first(q: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.empty_like(q)


def _fake_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_args: object, **_kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(v), torch.empty_like(v)


_BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ring_append": (_ring_append, _fake_nothing),
    "windowed_draft_attention": (_windowed_draft_attention, _fake_like_first),
    "paged_append": (_paged_append, _fake_nothing),
    "full_attention": (_full_attention, _fake_like_first),
    "gated_delta_rows": (_gated_delta_rows, _fake_delta),
    "gated_delta_commit": (_gated_delta_commit, _fake_nothing),
}

for _name, (_body, _fake) in _BODIES.items():
    _LIBRARY.define(_name + SCHEMAS[_name])
    _LIBRARY.impl(_name, _body, "CPU")
    torch.library.register_fake(f"wmtp::{_name}", _fake, lib=_LIBRARY)
