#pragma once

// The attention contract, framework free: raw pointers, shapes, and functions that check what they are told and then
// run. Tensors are dense and row major; strides follow from the shapes.

#include <cstdint>

namespace wmtp
{

enum class DType : int32_t
{
    kFloat32 = 0,
    kBFloat16 = 1,
};

struct ConstTensor
{
    void const* data;
    DType dtype;
};

struct MutableTensor
{
    void* data;
    DType dtype;
};

struct HeadShape
{
    int32_t n_query_heads; //!< 0 where a function has no queries
    int32_t n_kv_heads;
    int32_t head_dim;
};

//! Rows of the batch: request b owns rows [offsets[b], offsets[b + 1]).
struct RaggedRows
{
    int32_t const* offsets; //!< [n_requests + 1]
    int32_t n_requests;
    int64_t n_rows; //!< offsets[n_requests]
};

//! K and V rings, each [n_lanes, capacity, n_kv_heads, head_dim].
struct RingCache
{
    MutableTensor k;
    MutableTensor v;
    int32_t n_lanes;
    int64_t capacity;
    int64_t n_sink;
};

//! K and V pages, each [n_pages, page_size, n_kv_heads, head_dim]; position p of request b lies in page
//! block_table[b, p / page_size].
struct PagedCache
{
    MutableTensor k;
    MutableTensor v;
    int64_t n_pages;
    int64_t page_size;
    int32_t const* block_table; //!< [n_requests, max_pages]
    int64_t max_pages;
};

//! Row i of request b is its position start_positions[b] + i.
struct AppendRows
{
    ConstTensor k; //!< [rows.n_rows, n_kv_heads, head_dim]
    ConstTensor v;
    RaggedRows rows;
    int64_t const* start_positions; //!< [n_requests]
};

//! Ancestors of tree rows: bit i of a query's words says that it descends from (or is) appended row i of its request.
struct AncestorMask
{
    uint32_t const* words; //!< [n query rows, words_per_row]; null for chains
    int32_t words_per_row;
};

//! Stores the surviving rows. Throws std::invalid_argument on a bad value, before anything is written.
void ring_append(AppendRows const& append, HeadShape heads, RingCache const& ring, int32_t const* lanes, int n_threads);

//! Appends every row, then answers the last m_b rows of each request.
//!
//! A chain row at position q sees {p < n_sink} and {q - window < p <= q}. A tree row has the logical position
//! q = start + (number of its ancestors, itself included) - 1: it sees the history p < start by the same rule, and
//! of the appended rows its ancestors only.
void windowed_draft_attention(ConstTensor q, AppendRows const& append, RaggedRows queries, HeadShape heads,
    RingCache const& ring, int32_t const* lanes, int64_t window, float scale, AncestorMask mask, MutableTensor out,
    int n_threads);

void paged_append(AppendRows const& append, HeadShape heads, PagedCache const& pages, int n_threads);

//! The rows of a verify that form trees: bits count from position starts[b] of request b.
struct TreeRows
{
    AncestorMask mask;
    int64_t const* starts; //!< [n_requests]; null for chains
};

//! A chain row i sees positions 0..query_positions[i] of its request. A tree row sees every position before its tree's
//! start and of those from there on its ancestors; query_positions is not looked at.
void full_attention(ConstTensor q, RaggedRows queries, int64_t const* query_positions, HeadShape heads,
    PagedCache const& pages, float scale, TreeRows tree, MutableTensor out, int n_threads);

} // namespace wmtp
