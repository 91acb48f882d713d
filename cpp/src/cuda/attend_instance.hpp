#pragma once

#include "attend_tensor_core.hpp"
#include "kernels.hpp"

namespace wmtp::cuda
{

template <DType kRow, bool kCache8>
cudaError_t attend_tensor_core(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream)
{
    Grid const blocks{grid.n_row_tiles, grid.n_kv_heads, grid.n_splits};
    switch (args.head_dim)
    {
    case 64: return launch<AttendTensorCore<64, kRow, kCache8>>(blocks, args, stream);
    case 128: return launch<AttendTensorCore<128, kRow, kCache8>>(blocks, args, stream);
    case 256: return launch<AttendTensorCore<256, kRow, kCache8>>(blocks, args, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace wmtp::cuda
