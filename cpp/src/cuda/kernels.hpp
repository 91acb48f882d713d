#pragma once

// Launches of the compiled kernels, by file: each attend_*.cu instantiates three head sizes, so that a build can
// compile them side by side.

#include "arguments.hpp"

namespace wmtp::cuda
{

//! Row tiles, KV heads and splits of an attention launch.
struct AttendGrid
{
    int64_t n_row_tiles;
    int32_t n_kv_heads;
    int32_t n_splits;
};

// args.head_dim is 64, 128 or 256.
cudaError_t attend_bf16(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream);
cudaError_t attend_bf16_e4m3(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream);
cudaError_t attend_fp16(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream);
cudaError_t attend_fp16_e4m3(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream);
cudaError_t attend_simple(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream);

cudaError_t merge_splits(MergeArgs const& args, cudaStream_t stream);
cudaError_t append_rows(AppendArgs const& args, cudaStream_t stream);
cudaError_t gated_delta(GatedDeltaArgs const& args, cudaStream_t stream);

} // namespace wmtp::cuda
