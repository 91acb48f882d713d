#include "wmtp/cuda/launch.hpp"

#include "kernels.hpp"
#include "numeric.hpp"

namespace wmtp::cuda
{
namespace
{

bool is_16_bit(DType type)
{
    return type == DType::kBFloat16 || type == DType::kFloat16;
}

//! Query heads per KV head.
int32_t group_of(AttentionShape const& shape)
{
    return shape.n_query_heads / shape.n_kv_heads;
}

bool runs_on_tensor_cores(AttentionShape const& shape)
{
    bool const known_size = shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256;
    bool const known_cache = shape.kv_dtype == shape.row_dtype || shape.kv_dtype == DType::kFloat8E4M3;
    return known_size && known_cache && is_16_bit(shape.row_dtype);
}

//! Blocks that share a multiprocessor: the registers decide, see kMinBlocks of the kernels.
int32_t resident_blocks(AttentionShape const& shape)
{
    if (!runs_on_tensor_cores(shape))
    {
        return 3;
    }
    return shape.head_dim == 256 ? 2 : shape.head_dim == 128 ? 3 : 4;
}

int64_t row_tile_numbers(AttentionShape const& shape, int32_t n_queries, int32_t n_requests)
{
    return first_row_tile(n_queries, group_of(shape), n_requests);
}

Plan plan_splits(AttentionShape const& shape, int32_t n_requests, int32_t n_queries, int64_t max_keys, int32_t n_sms)
{
    if (n_queries < 1 || n_requests < 1)
    {
        return Plan{1, 0};
    }
    int64_t const packed = (static_cast<int64_t>(n_queries) * group_of(shape) + kTileRows - 1) / kTileRows;
    int64_t const row_tiles = larger(packed, smaller(n_requests, n_queries));
    int64_t const blocks = row_tiles * shape.n_kv_heads;
    int64_t const key_tiles = larger(1, (max_keys + kTileKeys - 1) / kTileKeys);
    // As many as are resident at once: one more wave would wait for the first.
    int64_t n_splits = static_cast<int64_t>(n_sms) * resident_blocks(shape) / blocks;
    n_splits = larger(1, smaller(n_splits, smaller(key_tiles, kMaxSplits)));
    int64_t const state_bytes = (shape.head_dim + 2) * static_cast<int64_t>(sizeof(float));
    int64_t const bytes = n_splits * n_queries * shape.n_query_heads * state_bytes;
    return Plan{static_cast<int32_t>(n_splits), n_splits == 1 ? 0 : bytes};
}

AttentionArgs attention_args(AttentionShape const& shape, Plan const& plan, int32_t n_requests, int32_t n_queries,
    void* workspace, float softmax_scale, float k_scale, float v_scale)
{
    AttentionArgs args{};
    args.n_requests = n_requests;
    args.n_queries = n_queries;
    args.n_query_heads = shape.n_query_heads;
    args.n_kv_heads = shape.n_kv_heads;
    args.group = group_of(shape);
    args.head_dim = shape.head_dim;
    args.n_splits = plan.n_splits;
    args.partial_acc = static_cast<float*>(workspace);
    args.partial_state = args.partial_acc + args.state_index(plan.n_splits, 0) * shape.head_dim;
    args.scale_log2 = softmax_scale * k_scale * kLog2E;
    args.v_scale = v_scale;
    args.row_dtype = shape.row_dtype;
    args.kv_dtype = shape.kv_dtype;
    return args;
}

cudaError_t attend(AttentionShape const& shape, AttentionArgs const& args, cudaStream_t stream)
{
    AttendGrid const grid{row_tile_numbers(shape, args.n_queries, args.n_requests), shape.n_kv_heads, args.n_splits};
    bool const cache_8 = shape.kv_dtype == DType::kFloat8E4M3;
    cudaError_t status = cudaSuccess;
    if (!runs_on_tensor_cores(shape))
    {
        status = attend_simple(grid, args, stream);
    }
    else if (shape.row_dtype == DType::kBFloat16)
    {
        status = cache_8 ? attend_bf16_e4m3(grid, args, stream) : attend_bf16(grid, args, stream);
    }
    else
    {
        status = cache_8 ? attend_fp16_e4m3(grid, args, stream) : attend_fp16(grid, args, stream);
    }
    if (status != cudaSuccess || args.n_splits == 1)
    {
        return status;
    }
    MergeArgs merge{};
    merge.partial_acc = args.partial_acc;
    merge.partial_state = args.partial_state;
    merge.out = args.out;
    merge.query_offsets = args.query_offsets;
    merge.n_requests = args.n_requests;
    merge.n_queries = args.n_queries;
    merge.n_query_heads = args.n_query_heads;
    merge.head_dim = args.head_dim;
    merge.n_splits = args.n_splits;
    merge.v_scale = args.v_scale;
    merge.row_dtype = args.row_dtype;
    return merge_splits(merge, stream);
}

AppendArgs append_args(AttentionShape const& shape, int32_t n_requests, int32_t n_rows, void const* k, void const* v,
    float k_scale, float v_scale)
{
    AppendArgs args{};
    args.k = k;
    args.v = v;
    args.n_requests = n_requests;
    args.n_rows = n_rows;
    args.row_elements = shape.n_kv_heads * shape.head_dim;
    args.k_inverse_scale = 1.0F / k_scale;
    args.v_inverse_scale = 1.0F / v_scale;
    args.row_dtype = shape.row_dtype;
    args.kv_dtype = shape.kv_dtype;
    return args;
}

} // namespace

Plan plan(WindowedShape const& shape, int32_t n_sms)
{
    int64_t const visible = shape.n_sink + shape.window + shape.n_queries;
    return plan_splits(shape.attention, shape.n_requests, shape.n_queries, smaller(visible, shape.capacity), n_sms);
}

Plan plan(PagedShape const& shape, int32_t n_sms)
{
    return plan_splits(shape.attention, shape.n_requests, shape.n_queries, shape.max_pages * shape.page_size, n_sms);
}

cudaError_t run_ring_append(WindowedShape const& shape, WindowedBuffers const& buffers, cudaStream_t stream)
{
    if (shape.n_requests < 1 || shape.n_rows < 1)
    {
        return cudaSuccess;
    }
    AppendArgs args = append_args(
        shape.attention, shape.n_requests, shape.n_rows, buffers.k, buffers.v, buffers.k_scale, buffers.v_scale);
    args.k_cache = buffers.ring_k;
    args.v_cache = buffers.ring_v;
    args.row_offsets = buffers.row_offsets;
    args.start_positions = buffers.start_positions;
    args.lanes = buffers.lanes;
    args.n_sink = shape.n_sink;
    args.capacity = shape.capacity;
    return append_rows(args, stream);
}

cudaError_t run(WindowedShape const& shape, Plan const& plan, WindowedBuffers const& buffers, cudaStream_t stream)
{
    cudaError_t const status = run_ring_append(shape, buffers, stream);
    if (status != cudaSuccess || shape.n_requests < 1 || shape.n_queries < 1)
    {
        return status;
    }
    AttentionArgs args = attention_args(shape.attention, plan, shape.n_requests, shape.n_queries, buffers.workspace,
        buffers.softmax_scale, buffers.k_scale, buffers.v_scale);
    args.q = buffers.q;
    args.k_cache = static_cast<char const*>(buffers.ring_k);
    args.v_cache = static_cast<char const*>(buffers.ring_v);
    args.out = buffers.out;
    args.query_offsets = buffers.query_offsets;
    args.row_offsets = buffers.row_offsets;
    args.start_positions = buffers.start_positions;
    args.lanes = buffers.lanes;
    args.ancestor_mask = shape.mask_words > 0 ? buffers.ancestor_mask : nullptr;
    args.mask_words = shape.mask_words;
    args.n_sink = shape.n_sink;
    args.window = shape.window;
    args.capacity = shape.capacity;
    return attend(shape.attention, args, stream);
}

cudaError_t run_paged_append(PagedShape const& shape, PagedBuffers const& buffers, cudaStream_t stream)
{
    if (shape.n_requests < 1 || shape.n_rows < 1)
    {
        return cudaSuccess;
    }
    AppendArgs args = append_args(
        shape.attention, shape.n_requests, shape.n_rows, buffers.k, buffers.v, buffers.k_scale, buffers.v_scale);
    args.k_cache = buffers.k_pages;
    args.v_cache = buffers.v_pages;
    args.row_offsets = buffers.row_offsets;
    args.start_positions = buffers.start_positions;
    args.block_table = buffers.block_table;
    args.max_pages = shape.max_pages;
    args.page_size = shape.page_size;
    return append_rows(args, stream);
}

cudaError_t run_full_attention(
    PagedShape const& shape, Plan const& plan, PagedBuffers const& buffers, cudaStream_t stream)
{
    if (shape.n_requests < 1 || shape.n_queries < 1)
    {
        return cudaSuccess;
    }
    AttentionArgs args = attention_args(shape.attention, plan, shape.n_requests, shape.n_queries, buffers.workspace,
        buffers.softmax_scale, buffers.k_scale, buffers.v_scale);
    args.q = buffers.q;
    args.k_cache = static_cast<char const*>(buffers.k_pages);
    args.v_cache = static_cast<char const*>(buffers.v_pages);
    args.out = buffers.out;
    args.query_offsets = buffers.query_offsets;
    args.query_positions = buffers.query_positions;
    args.start_positions = buffers.tree_starts;
    args.ancestor_mask = shape.mask_words > 0 ? buffers.ancestor_mask : nullptr;
    args.mask_words = shape.mask_words;
    args.block_table = buffers.block_table;
    args.max_pages = static_cast<int32_t>(shape.max_pages);
    args.page_size = static_cast<int32_t>(shape.page_size);
    args.window = kEverything;
    return attend(shape.attention, args, stream);
}

cudaError_t run_gated_delta_rows(float const* q, float const* k, float const* v, float const* g, float const* beta,
    float const* state, int32_t const* slots, GatedDeltaShape const& shape, float* out, float* delta,
    cudaStream_t stream)
{
    if (shape.n_requests < 1 || shape.n_rows < 1)
    {
        return cudaSuccess;
    }
    // With q given the kernel only reads the state.
    return gated_delta(
        GatedDeltaArgs{q, k, v, g, beta, const_cast<float*>(state), slots, nullptr, out, delta, shape}, stream);
}

cudaError_t run_gated_delta_commit(float const* k, float const* g, float const* delta, float* state,
    int32_t const* slots, int32_t const* counts, GatedDeltaShape const& shape, cudaStream_t stream)
{
    if (shape.n_requests < 1 || shape.n_rows < 1)
    {
        return cudaSuccess;
    }
    // With counts given the kernel only reads delta.
    return gated_delta(GatedDeltaArgs{nullptr, k, nullptr, g, nullptr, state, slots, counts, nullptr,
                           const_cast<float*>(delta), shape},
        stream);
}

} // namespace wmtp::cuda
