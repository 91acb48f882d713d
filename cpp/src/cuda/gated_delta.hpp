#pragma once

// Gated DeltaNet rows. Columns of the state never mix, so a block has 32 of them in shared memory while all rows pass
// over it; four warps share the key dims. Grid: value head, request, 32 columns. Rows and commit run the same
// operations in the same order, so a committed state is bit for bit the one the rows went through.

#include "arguments.hpp"
#include "device.hpp"

namespace wmtp::cuda
{

template <bool kCommit>
struct GatedDelta
{
    using Args = GatedDeltaArgs;
    static constexpr int kThreads = 128;
    static constexpr int kMinBlocks = 4;
    static constexpr int kColumns = 32;
    static constexpr int kMaxKeyDim = 256;

    struct Shared
    {
        float state[kMaxKeyDim][kColumns];
        float q[kMaxKeyDim];
        float k[kMaxKeyDim];
        float recalled[4][kColumns];
        float answered[4][kColumns];
    };

    //! Every warp sums all squares by itself: no barrier, and one order everywhere.
    static WMTP_DEVICE void normalise(float const* in, int32_t dim, float factor, float* out)
    {
        int32_t const lane = thread_index() % 32;
        float squares = 0.0F;
        for (int32_t d = lane; d < dim; d += 32)
        {
            squares = fmaf(in[d], in[d], squares);
        }
        for (int32_t lanes = 1; lanes < 32; lanes *= 2)
        {
            squares += shuffle_xor(squares, lanes);
        }
        float const scale = factor / sqrtf(squares + 1e-6F);
        for (int32_t d = thread_index(); d < dim; d += kThreads)
        {
            out[d] = in[d] * scale;
        }
    }

    static WMTP_DEVICE void body(GatedDeltaArgs const& args, Shared& shared)
    {
        GatedDeltaShape const& shape = args.shape;
        int32_t const head = block_x();
        int32_t const request = block_y();
        int32_t const lane = thread_index() % 32;
        int32_t const warp = thread_index() / 32;
        int32_t const column = block_z() * kColumns + lane;
        bool const mine = column < shape.value_dim;
        int32_t const key_head = head / (shape.n_value_heads / shape.n_key_heads);
        int32_t const n_rows = kCommit ? args.counts[request] : shape.n_rows;
        float* const state = args.state
            + (static_cast<int64_t>(args.slots[request]) * shape.n_value_heads + head) * shape.key_dim
                * shape.value_dim;
        for (int32_t d = warp; d < shape.key_dim; d += 4)
        {
            shared.state[d][lane] = mine ? state[static_cast<int64_t>(d) * shape.value_dim + column] : 0.0F;
        }
        float const query_factor = 1.0F / sqrtf(static_cast<float>(shape.key_dim));
        for (int32_t row = 0; row < n_rows; ++row)
        {
            int64_t const at = static_cast<int64_t>(request) * shape.n_rows + row;
            int64_t const key_at = (at * shape.n_key_heads + key_head) * shape.key_dim;
            int64_t const value_at = (at * shape.n_value_heads + head) * shape.value_dim + column;
            float const decay = expf(args.g[at * shape.n_value_heads + head]);
            sync_block(); // the previous row is done with q and k
            normalise(args.k + key_at, shape.key_dim, 1.0F, shared.k);
            if constexpr (!kCommit)
            {
                normalise(args.q + key_at, shape.key_dim, query_factor, shared.q);
            }
            sync_block();
            float delta = 0.0F;
            if constexpr (kCommit)
            {
                delta = mine ? args.delta[value_at] : 0.0F;
            }
            else
            {
                float recalled = 0.0F;
                for (int32_t d = warp; d < shape.key_dim; d += 4)
                {
                    recalled = fmaf(shared.state[d][lane] * decay, shared.k[d], recalled);
                }
                shared.recalled[warp][lane] = recalled;
                sync_block();
                recalled = (shared.recalled[0][lane] + shared.recalled[1][lane])
                    + (shared.recalled[2][lane] + shared.recalled[3][lane]);
                float const beta = args.beta[at * shape.n_value_heads + head];
                delta = mine ? (args.v[value_at] - recalled) * beta : 0.0F;
            }
            float answered = 0.0F;
            for (int32_t d = warp; d < shape.key_dim; d += 4)
            {
                float const updated = fmaf(shared.k[d], delta, shared.state[d][lane] * decay);
                shared.state[d][lane] = updated;
                if constexpr (!kCommit)
                {
                    answered = fmaf(updated, shared.q[d], answered);
                }
            }
            if constexpr (!kCommit)
            {
                shared.answered[warp][lane] = answered;
                sync_block();
                if (warp == 0 && mine)
                {
                    args.delta[value_at] = delta;
                    args.out[value_at] = (shared.answered[0][lane] + shared.answered[1][lane])
                        + (shared.answered[2][lane] + shared.answered[3][lane]);
                }
            }
        }
        if constexpr (kCommit)
        {
            for (int32_t d = warp; d < shape.key_dim && mine; d += 4)
            {
                state[static_cast<int64_t>(d) * shape.value_dim + column] = shared.state[d][lane];
            }
        }
    }
};

} // namespace wmtp::cuda
