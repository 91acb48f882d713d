#pragma once

// What the kernels are told: one plain struct per kernel, filled by the launchers.

#include <cstdint>

#include "keys.hpp"
#include "wmtp/cuda/launch.hpp"

namespace wmtp::cuda
{

struct AttentionArgs
{
    void const* q;
    char const* k_cache;
    char const* v_cache;
    void* out;
    float* partial_acc;   //!< [n_splits, n_queries, n_query_heads, head_dim]; not used by a single split
    float* partial_state; //!< [n_splits, n_queries, n_query_heads, 2]: maximum in units of log2, sum of weights
    int32_t const* query_offsets;
    int32_t const* row_offsets;     //!< ring only
    int64_t const* start_positions; //!< ring, and pages with an ancestor mask
    int32_t const* lanes;           //!< ring only
    uint32_t const* ancestor_mask;  //!< null for chains
    int64_t const* query_positions; //!< pages only; null says that this is a ring
    int32_t const* block_table;     //!< pages only
    int64_t n_sink;
    int64_t window;
    int64_t capacity;
    int32_t max_pages;
    int32_t page_size;
    int32_t n_requests;
    int32_t n_queries;
    int32_t n_query_heads;
    int32_t n_kv_heads;
    int32_t group; //!< query heads per KV head
    int32_t head_dim;
    int32_t mask_words;
    int32_t n_splits;
    float scale_log2; //!< softmax scale times k_scale times log2(e)
    float v_scale;
    DType row_dtype;
    DType kv_dtype;

    WMTP_HD int64_t state_index(int32_t split, int64_t query_head) const
    {
        return static_cast<int64_t>(split) * n_queries * n_query_heads + query_head;
    }
};

struct AppendArgs
{
    void const* k;
    void const* v;
    void* k_cache;
    void* v_cache;
    int32_t const* row_offsets;
    int64_t const* start_positions;
    int32_t const* lanes;       //!< ring only; null says that these are pages
    int32_t const* block_table; //!< pages only
    int64_t n_sink;
    int64_t capacity;
    int64_t max_pages;
    int64_t page_size;
    int32_t n_requests;
    int32_t n_rows;
    int32_t row_elements; //!< n_kv_heads * head_dim
    float k_inverse_scale;
    float v_inverse_scale;
    DType row_dtype;
    DType kv_dtype;
};

struct MergeArgs
{
    float const* partial_acc;
    float const* partial_state;
    void* out;
    int32_t const* query_offsets;
    int32_t n_requests;
    int32_t n_queries;
    int32_t n_query_heads;
    int32_t head_dim;
    int32_t n_splits;
    float v_scale;
    DType row_dtype;
};

struct GatedDeltaArgs
{
    float const* q; //!< null for a commit
    float const* k;
    float const* v;
    float const* g;
    float const* beta;
    float* state; //!< rows: only read
    int32_t const* slots;
    int32_t const* counts; //!< null for rows
    float* out;
    float* delta; //!< commit: only read
    GatedDeltaShape shape;
};

} // namespace wmtp::cuda
