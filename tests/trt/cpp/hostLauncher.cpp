// The launcher's interface over the CPU kernels, for a plugin whose enqueue runs where there is no GPU: pointers are
// host pointers, the stream is ignored. What it refuses is the launcher's own check.cpp. It writes to every byte of
// the workspace it planned, so that a sanitizer sees a reservation that is too small.

#include <cstring>
#include <exception>

#include "wmtp/attention.hpp"
#include "wmtp/cuda/launch.hpp"

namespace wmtp::cuda
{

Plan plan(WindowedShape const& shape, int32_t n_sms)
{
    int32_t const n_splits = n_sms / (shape.n_queries < 1 ? 1 : shape.n_queries);
    int64_t const bytes = int64_t{16} * n_splits * shape.n_queries;
    return n_splits < 2 ? Plan{1, 0} : Plan{n_splits, bytes};
}

cudaError_t sm_count(int32_t* n_sms)
{
    *n_sms = 64;
    return cudaSuccess;
}

cudaError_t run(WindowedShape const& shape, Plan const& plan, WindowedBuffers const& buffers, cudaStream_t)
{
    AttentionShape const& a = shape.attention;
    if (a.row_dtype == DType::kFloat16 || a.kv_dtype != a.row_dtype)
    {
        return cudaErrorNotSupported;
    }
    if (plan.workspace_bytes > 0)
    {
        std::memset(buffers.workspace, 0xFF, static_cast<size_t>(plan.workspace_bytes));
    }
    auto const type = static_cast<wmtp::DType>(a.row_dtype);
    try
    {
        windowed_draft_attention({buffers.q, type},
            {{buffers.k, type}, {buffers.v, type},
                {buffers.row_offsets, shape.n_requests, buffers.row_offsets[shape.n_requests]},
                buffers.start_positions},
            {buffers.query_offsets, shape.n_requests, buffers.query_offsets[shape.n_requests]},
            {a.n_query_heads, a.n_kv_heads, a.head_dim},
            {{buffers.ring_k, type}, {buffers.ring_v, type}, shape.n_lanes, shape.capacity, shape.n_sink},
            buffers.lanes, shape.window, buffers.softmax_scale, {buffers.ancestor_mask, shape.mask_words},
            {buffers.out, type}, 1);
    }
    catch (std::exception const&)
    {
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

} // namespace wmtp::cuda
