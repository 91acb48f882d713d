#pragma once

// Merges the splits of every (query row, head). Grid: (query row, head), 64 dims. A second kernel rather than the last
// block to finish: one block would read all partial accumulators alone, and this way nothing has to be zeroed between
// launches and the order of the sum is fixed.

#include "arguments.hpp"
#include "device.hpp"

namespace wmtp::cuda
{

struct MergeSplits
{
    using Args = MergeArgs;
    static constexpr int kThreads = 128;
    static constexpr int kMinBlocks = 8;
    static constexpr int kLanes = kThreads / 16; //!< splits that are read at the same time

    struct Shared
    {
        float weight[kMaxSplits];
        float of_warp[4];
        float part[kLanes][64];
    };

    template <class Combine>
    static WMTP_DEVICE float over_block(float value, Shared& shared, Combine combine)
    {
        for (int32_t lanes = 1; lanes < 32; lanes *= 2)
        {
            value = combine(value, shuffle_xor(value, lanes));
        }
        sync_block(); // the previous use of of_warp is over
        if (thread_index() % 32 == 0)
        {
            shared.of_warp[thread_index() / 32] = value;
        }
        sync_block();
        return combine(combine(shared.of_warp[0], shared.of_warp[1]), combine(shared.of_warp[2], shared.of_warp[3]));
    }

    static WMTP_DEVICE void body(MergeArgs const& args, Shared& shared)
    {
        int32_t const thread = thread_index();
        int64_t const query_head = block_x();
        if (query_head / args.n_query_heads >= args.query_offsets[args.n_requests])
        {
            return;
        }
        int64_t const split_stride = static_cast<int64_t>(args.n_queries) * args.n_query_heads;
        float highest = negative_infinity();
        for (int32_t s = thread; s < args.n_splits; s += kThreads)
        {
            highest = maximum(highest, args.partial_state[2 * (s * split_stride + query_head)]);
        }
        highest = over_block(highest, shared, [](float a, float b) { return maximum(a, b); });
        float sum = 0.0F;
        for (int32_t s = thread; s < args.n_splits; s += kThreads)
        {
            float const* const state = args.partial_state + 2 * (s * split_stride + query_head);
            // A split that saw nothing weighs nothing, and its accumulators are not to be read.
            float const weight = state[1] > 0.0F ? exp2_fast(state[0] - highest) : 0.0F;
            shared.weight[s] = weight;
            sum += weight * state[1];
        }
        sum = over_block(sum, shared, [](float a, float b) { return a + b; });

        int32_t const column = thread % 16 * 4;
        int32_t const lane = thread / 16;
        int32_t const dim = block_y() * 64 + column;
        Floats4 total{};
        if (dim < args.head_dim)
        {
            WMTP_UNROLL_4
            for (int32_t s = lane; s < args.n_splits; s += kLanes)
            {
                float const weight = shared.weight[s];
                if (weight > 0.0F)
                {
                    Floats4 const part =
                        load_floats(args.partial_acc + (s * split_stride + query_head) * args.head_dim + dim);
                    WMTP_UNROLL
                    for (int i = 0; i < 4; ++i)
                    {
                        total.f[i] += weight * part.f[i];
                    }
                }
            }
        }
        WMTP_UNROLL
        for (int i = 0; i < 4; ++i)
        {
            shared.part[lane][column + i] = total.f[i];
        }
        sync_block();
        int32_t const own_dim = block_y() * 64 + thread;
        if (thread < 64 && own_dim < args.head_dim)
        {
            float value = 0.0F;
            WMTP_UNROLL
            for (int i = 0; i < kLanes; ++i)
            {
                value += shared.part[i][thread];
            }
            store_element(args.out, args.row_dtype, query_head * args.head_dim + own_dim, value * args.v_scale / sum);
        }
    }
};

} // namespace wmtp::cuda
