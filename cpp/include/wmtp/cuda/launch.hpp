#pragma once

// Launchers of the CUDA kernels: raw device pointers, host shapes, cudaError_t.
//
// Three steps. `check` says in words what is wrong with a shape; `plan` is host arithmetic and needs no device; `run`
// launches, allocates nothing, synchronises nothing and may be captured in a CUDA graph. Everything that changes from
// step to step (lengths, lanes, offsets, page tables) is read on the device, so a captured graph stays valid while
// requests grow: only the shapes below are frozen into it.
//
// `run` assumes what `check` has verified. It cannot look at device data without a synchronisation: offsets must be
// ascending, positions not negative, lanes within [0, n_lanes) and distinct, page numbers within [0, n_pages).

#include <cstdint>
#include <string>

#include <cuda_runtime_api.h>

#include "wmtp/gated_delta.hpp"

namespace wmtp::cuda
{

enum class DType : int32_t
{
    kFloat32 = 0,
    kBFloat16 = 1,
    kFloat16 = 2,
    kFloat8E4M3 = 3, //!< caches only
};

//! Heads and types. Queries, appended rows and outputs share one type. 16-bit queries with head_dim 64, 128 or 256 and
//! a cache of the same type or of 8 bits run on tensor cores; float32, other caches and any other head_dim that is a
//! multiple of 16 up to 256 run on a simple kernel.
struct AttentionShape
{
    int32_t n_query_heads; //!< a multiple of n_kv_heads
    int32_t n_kv_heads;
    int32_t head_dim;
    DType row_dtype;
    DType kv_dtype;
};

//! Append n_rows rows in all, then answer n_queries of them: of request b the last m_b.
struct WindowedShape
{
    AttentionShape attention;
    int32_t n_requests;
    int32_t n_rows;    //!< all requests together, an upper bound of row_offsets[n_requests]
    int32_t n_queries; //!< an upper bound of query_offsets[n_requests]
    int32_t n_lanes;
    int64_t capacity;
    int64_t n_sink;
    int64_t window;
    int32_t mask_words; //!< words per query row of the ancestor mask; 0 for chains
};

//! What `plan` decides. A plan serves every shape that is not larger in n_requests, n_rows, n_queries and visible keys.
struct Plan
{
    int32_t n_splits;        //!< blocks that share the keys of one query tile; 1 writes the output directly
    int64_t workspace_bytes; //!< may be 0
};

//! Device pointers. Rows, caches, outputs and workspace are aligned to 16 bytes.
struct WindowedBuffers
{
    void const* q;                  //!< [n_queries, n_query_heads, head_dim]
    void const* k;                  //!< [n_rows, n_kv_heads, head_dim]
    void const* v;                  //!< [n_rows, n_kv_heads, head_dim]
    void* ring_k;                   //!< [n_lanes, capacity, n_kv_heads, head_dim], updated in place
    void* ring_v;                   //!< like ring_k
    int32_t const* row_offsets;     //!< [n_requests + 1]
    int32_t const* query_offsets;   //!< [n_requests + 1]
    int64_t const* start_positions; //!< [n_requests]
    int32_t const* lanes;           //!< [n_requests]
    uint32_t const* ancestor_mask;  //!< [n_queries, mask_words], null for chains
    void* out;                      //!< like q
    void* workspace;                //!< plan.workspace_bytes; undefined before and after
    float softmax_scale;
    float k_scale; //!< value = k_scale * stored; 1 unless the cache has 8 bits
    float v_scale;
};

//! Empty when the shape can run, otherwise one sentence with the value, the rule and the remedy.
std::string check(WindowedShape const& shape);
//! Likewise for the pointers: null or misaligned.
std::string check(WindowedShape const& shape, WindowedBuffers const& buffers);

Plan plan(WindowedShape const& shape, int32_t n_sms);

//! Append, then answer.
cudaError_t run(WindowedShape const& shape, Plan const& plan, WindowedBuffers const& buffers, cudaStream_t stream);

//! Append only: of the buffers it reads k, v, the rings, row_offsets, start_positions, lanes and the KV scales. The
//! shape's queries and window are not looked at.
cudaError_t run_ring_append(WindowedShape const& shape, WindowedBuffers const& buffers, cudaStream_t stream);

// --- The target's full attention over pages
// ---------------------------------------------------------------------------

//! Position p of request b lies in page block_table[b, p / page_size].
struct PagedShape
{
    AttentionShape attention;
    int32_t n_requests;
    int32_t n_rows;    //!< appended rows, all requests together; 0 where only attention runs
    int32_t n_queries; //!< 0 where only the append runs
    int64_t n_pages;
    int64_t page_size;
    int64_t max_pages;  //!< per request
    int32_t mask_words; //!< words per query row of the ancestor mask; 0 for chains
};

struct PagedBuffers
{
    void const* q; //!< [n_queries, n_query_heads, head_dim]
    void const* k; //!< append only: [n_rows, n_kv_heads, head_dim]
    void const* v;
    void* k_pages; //!< [n_pages, page_size, n_kv_heads, head_dim]
    void* v_pages;
    int32_t const* block_table;     //!< [n_requests, max_pages]
    int32_t const* row_offsets;     //!< append only: [n_requests + 1]
    int64_t const* start_positions; //!< append only: [n_requests]
    int32_t const* query_offsets;   //!< attention only: [n_requests + 1]
    int64_t const* query_positions; //!< attention only: [n_queries]; a chain row sees positions 0 .. its own
    uint32_t const* ancestor_mask;  //!< attention only: [n_queries, mask_words], null for chains
    int64_t const* tree_starts;     //!< with a mask: [n_requests]; positions from there on are decided by it
    void* out;
    void* workspace;
    float softmax_scale;
    float k_scale;
    float v_scale;
};

std::string check(PagedShape const& shape);
std::string check(PagedShape const& shape, PagedBuffers const& buffers);
Plan plan(PagedShape const& shape, int32_t n_sms);
cudaError_t run_paged_append(PagedShape const& shape, PagedBuffers const& buffers, cudaStream_t stream);
cudaError_t run_full_attention(
    PagedShape const& shape, Plan const& plan, PagedBuffers const& buffers, cudaStream_t stream);

// --- Gated DeltaNet rows: the contract of wmtp/gated_delta.hpp with device pointers
// -----------------------------------

std::string check(GatedDeltaShape const& shape);
cudaError_t run_gated_delta_rows(float const* q, float const* k, float const* v, float const* g, float const* beta,
    float const* state, int32_t const* slots, GatedDeltaShape const& shape, float* out, float* delta,
    cudaStream_t stream);
cudaError_t run_gated_delta_commit(float const* k, float const* g, float const* delta, float* state,
    int32_t const* slots, int32_t const* counts, GatedDeltaShape const& shape, cudaStream_t stream);

// --- The machine
// ------------------------------------------------------------------------------------------------------

//! Streaming multiprocessors of the current device: what `plan` wants. Touches the driver; call it once.
cudaError_t sm_count(int32_t* n_sms);

} // namespace wmtp::cuda
