#include "kernels.hpp"

#include "append_rows.hpp"
#include "attend_simple.hpp"
#include "gated_delta.hpp"
#include "merge_splits.hpp"

namespace wmtp::cuda
{

cudaError_t attend_simple(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream)
{
    return launch<AttendSimple>(Grid{grid.n_row_tiles, grid.n_kv_heads, grid.n_splits}, args, stream);
}

cudaError_t merge_splits(MergeArgs const& args, cudaStream_t stream)
{
    int64_t const query_heads = static_cast<int64_t>(args.n_queries) * args.n_query_heads;
    return launch<MergeSplits>(Grid{query_heads, (args.head_dim + 63) / 64, 1}, args, stream);
}

cudaError_t append_rows(AppendArgs const& args, cudaStream_t stream)
{
    constexpr int64_t kThreads = AppendRowsKernel::kThreads;
    int64_t const units = static_cast<int64_t>(args.n_rows) * 2 * (args.row_elements / AppendRowsKernel::kElements);
    return launch<AppendRowsKernel>(Grid{(units + kThreads - 1) / kThreads, 1, 1}, args, stream);
}

cudaError_t gated_delta(GatedDeltaArgs const& args, cudaStream_t stream)
{
    using Rows = GatedDelta<false>;
    using Commit = GatedDelta<true>;
    Grid const grid{
        args.shape.n_value_heads, args.shape.n_requests, (args.shape.value_dim + Rows::kColumns - 1) / Rows::kColumns};
    return args.counts == nullptr ? launch<Rows>(grid, args, stream) : launch<Commit>(grid, args, stream);
}

} // namespace wmtp::cuda
