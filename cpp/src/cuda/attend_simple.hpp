#pragma once

// Attention for what the tensor core kernel does not take: float32 queries, caches of another type than the queries,
// other head sizes. Same grid, same splits, same merge; plain float32 arithmetic.

#include "row_tile.hpp"

namespace wmtp::cuda
{

struct AttendSimple
{
    using Args = AttentionArgs;
    static constexpr int kThreads = kAttendThreads;
    static constexpr int kMinBlocks = 3;
    static constexpr int kMaxHeadDim = 256;
    static constexpr int kDims = kMaxHeadDim / kThreads; //!< output dims of a thread

    struct Shared
    {
        RowTileShared tile;
        float q[kTileRows][kMaxHeadDim];
        float weights[kTileRows][kTileKeys + 1];
        float decay[kTileRows];
        float max_log2[kTileRows];
        float sum[kTileRows];
    };

    static WMTP_DEVICE int64_t key_row(AttentionArgs const& args, RowTile const& tile, int32_t key)
    {
        return (static_cast<int64_t>(cell_of(args, tile, key)) * args.n_kv_heads + block_y()) * args.head_dim;
    }

    //! A thread has one key and half of the rows.
    static WMTP_DEVICE void score(AttentionArgs const& args, RowTile const& tile, Shared& shared, int32_t first_key)
    {
        constexpr int kRows = kTileRows / 2;
        int32_t const column = thread_index() % kTileKeys;
        int32_t const first_row = thread_index() / kTileKeys * kRows;
        int32_t const key = first_key + column;
        float scores[kRows] = {};
        if (key < tile.keys.count)
        {
            int64_t const at = key_row(args, tile, key);
            for (int32_t d = 0; d < args.head_dim; ++d)
            {
                float const element = load_element(args.k_cache, args.kv_dtype, at + d);
                WMTP_UNROLL
                for (int i = 0; i < kRows; ++i)
                {
                    scores[i] += shared.q[first_row + i][d] * element;
                }
            }
        }
        WMTP_UNROLL
        for (int i = 0; i < kRows; ++i)
        {
            int32_t const row = first_row + i;
            bool const seen = key < tile.keys.count
                && sees(tile.rule, shared.tile.position[row], tile.ancestors(args, row), tile.keys.position(key));
            shared.weights[row][column] = seen ? scores[i] * args.scale_log2 : negative_infinity();
        }
    }

    //! Eight threads have one row.
    static WMTP_DEVICE void weigh(Shared& shared)
    {
        int32_t const row = thread_index() / 8;
        int32_t const part = thread_index() % 8;
        float const before = shared.max_log2[row];
        float highest = before;
        for (int32_t column = part; column < kTileKeys; column += 8)
        {
            highest = maximum(highest, shared.weights[row][column]);
        }
        for (int32_t lanes = 1; lanes < 8; lanes *= 2)
        {
            highest = maximum(highest, shuffle_xor(highest, lanes));
        }
        float const reference = highest == negative_infinity() ? 0.0F : highest;
        float sum = 0.0F;
        for (int32_t column = part; column < kTileKeys; column += 8)
        {
            float const weight = exp2_fast(shared.weights[row][column] - reference);
            shared.weights[row][column] = weight;
            sum += weight;
        }
        for (int32_t lanes = 1; lanes < 8; lanes *= 2)
        {
            sum += shuffle_xor(sum, lanes);
        }
        if (part == 0)
        {
            float const decay = exp2_fast(before - reference);
            shared.decay[row] = decay;
            shared.max_log2[row] = highest;
            shared.sum[row] = shared.sum[row] * decay + sum;
        }
    }

    static WMTP_DEVICE void body(AttentionArgs const& args, Shared& shared)
    {
        RowTile const tile = open_row_tile(args, shared.tile);
        if (tile.n_rows == 0)
        {
            return;
        }
        TileRange const range = split_tiles(tile.keys.n_tiles(), block_z(), args.n_splits);
        if (range.begin == range.end)
        {
            leave_empty_split(args, tile);
            return;
        }
        int32_t const thread = thread_index();
        for (int32_t i = thread; i < kTileRows * args.head_dim; i += kThreads)
        {
            int32_t const row = i / args.head_dim;
            int32_t const d = i % args.head_dim;
            int64_t const at = tile.query_head(args, block_y(), row) * args.head_dim + d;
            shared.q[row][d] = tile.has(row) ? load_element(args.q, args.row_dtype, at) : 0.0F;
        }
        if (thread < kTileRows)
        {
            shared.max_log2[thread] = negative_infinity();
            shared.sum[thread] = 0.0F;
        }
        sync_block();

        float acc[kDims][kTileRows] = {};
        for (int32_t at = range.begin; at < range.end; ++at)
        {
            int32_t const first_key = at * kTileKeys;
            score(args, tile, shared, first_key);
            sync_block();
            weigh(shared);
            sync_block();
            WMTP_UNROLL
            for (int row = 0; row < kTileRows; ++row)
            {
                WMTP_UNROLL
                for (int i = 0; i < kDims; ++i)
                {
                    acc[i][row] *= shared.decay[row];
                }
            }
            int32_t const n_keys = tile.keys.count - first_key < kTileKeys ? tile.keys.count - first_key : kTileKeys;
            for (int32_t column = 0; column < n_keys; ++column)
            {
                int64_t const value_row = key_row(args, tile, first_key + column);
                WMTP_UNROLL
                for (int i = 0; i < kDims; ++i)
                {
                    int32_t const d = thread + i * kThreads;
                    if (d < args.head_dim)
                    {
                        float const element = load_element(args.v_cache, args.kv_dtype, value_row + d);
                        WMTP_UNROLL
                        for (int row = 0; row < kTileRows; ++row)
                        {
                            acc[i][row] += shared.weights[row][column] * element;
                        }
                    }
                }
            }
            sync_block();
        }

        WMTP_UNROLL
        for (int row = 0; row < kTileRows; ++row)
        {
            if (!tile.has(row))
            {
                continue;
            }
            int64_t const query_head = tile.query_head(args, block_y(), row);
            int64_t const at = args.state_index(block_z(), query_head);
            WMTP_UNROLL
            for (int i = 0; i < kDims; ++i)
            {
                int32_t const d = thread + i * kThreads;
                if (d >= args.head_dim)
                {
                    continue;
                }
                if (args.n_splits == 1)
                {
                    float const value = acc[i][row] * args.v_scale / shared.sum[row];
                    store_element(args.out, args.row_dtype, query_head * args.head_dim + d, value);
                }
                else
                {
                    args.partial_acc[at * args.head_dim + d] = acc[i][row];
                }
            }
            if (args.n_splits > 1 && thread == 0)
            {
                args.partial_state[2 * at] = shared.max_log2[row];
                args.partial_state[2 * at + 1] = shared.sum[row];
            }
        }
    }
};

} // namespace wmtp::cuda
