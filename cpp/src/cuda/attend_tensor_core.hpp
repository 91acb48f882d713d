#pragma once

// Attention of 16-bit queries on tensor cores, keys split over blocks (grid: row tile, KV head, split).
//
// A block of four warps takes 64 keys at a time. For the scores each warp has 16 of the keys; for the values each warp
// has 64 of the dims and an equal part of the keys. So no warp holds more than 16 x 64 accumulators, whatever the head
// size, and the registers that this frees hold the next keys and values while they travel: a block asks for its 64 keys
// and their values at once. Weights change hands through shared memory; keys and values go from the cache to registers
// and never through it, because the fragments are laid out so that one 16-byte load is a lane's share:
//
// - Scores sum over dims, so dims may be numbered as we like if queries and keys agree: a lane's 16 bytes of a key row
//   are its words of consecutive tensor core steps.
// - Values: a lane has 8 consecutive dims of four keys. Pairing the same dim of two keys is a byte permutation, and the
//   i-th dim of every lane's eight makes the i-th output tile.

#include <type_traits>

#include "row_tile.hpp"

namespace wmtp::cuda
{

template <int kHeadDim, DType kRow, bool kCache8>
struct AttendTensorCore
{
    using Args = AttentionArgs;
    static constexpr int kThreads = kAttendThreads;
    static constexpr int kMinBlocks = kHeadDim == 256 ? 2 : kHeadDim == 128 ? 3 : 4;

    static constexpr int kElementBytes = kCache8 ? 1 : 2;
    static constexpr int kKeyLoads = kHeadDim * kElementBytes / 64; //!< 16-byte loads of a lane for one key
    static constexpr int kSteps = kHeadDim / 16;                    //!< tensor core steps of one score tile
    static constexpr int kDimGroups = kHeadDim / 64;
    static constexpr int kKeyGroups = 4 / kDimGroups;
    static constexpr int kValueSteps = kTileKeys / 16 / kKeyGroups;
    static constexpr int kWeightStride = kTileKeys / 2 + 4; //!< words; four more keep the banks apart
    using ValueWords = std::conditional_t<kCache8, Words2, Words4>;

    struct Shared
    {
        RowTileShared tile;
        Words4 q[kHeadDim / 32][2][32]; //!< two steps of a lane's row (of its row + 8)
        uint32_t weights[kTileRows * kWeightStride];
        float tile_max[4][kTileRows];
        float sum[4][kTileRows];
        float acc[kKeyGroups == 1 ? 1 : (kKeyGroups - 1) * kDimGroups][32][32];
    };

    struct Keys
    {
        Words4 raw[2][kKeyLoads];
    };

    struct Values
    {
        ValueWords raw[kValueSteps][4];
    };

    struct Lane
    {
        int32_t warp;
        int32_t lane;
        int32_t g;
        int32_t t;
        int32_t dim_group;
        int32_t key_group;
    };

    static WMTP_DEVICE Lane this_lane()
    {
        int32_t const thread = thread_index();
        int32_t const warp = thread / 32;
        int32_t const lane = thread % 32;
        return Lane{warp, lane, lane / 4, lane % 4, warp % kDimGroups, warp / kDimGroups};
    }

    //! First dim of the eight that `part` names, of a lane with index t in its quad.
    static WMTP_DEVICE int32_t query_dim(int32_t part, int32_t t)
    {
        return kCache8 ? part / 2 * 64 + t * 16 + part % 2 * 8 : part * 32 + t * 8;
    }

    static WMTP_DEVICE void share_queries(AttentionArgs const& args, RowTile const& tile, Shared& shared)
    {
        for (int32_t i = thread_index(); i < kHeadDim / 32 * 64; i += kThreads)
        {
            int32_t const part = i / 64;
            int32_t const half = i / 32 % 2;
            int32_t const lane = i % 32;
            int32_t const row = lane / 4 + 8 * half;
            Words4 words{};
            if (tile.has(row))
            {
                int64_t const at = tile.query_head(args, block_y(), row) * kHeadDim + query_dim(part, lane % 4);
                words = load_16_bytes(static_cast<uint16_t const*>(args.q) + at);
            }
            shared.q[part][half][lane] = words;
        }
    }

    static WMTP_DEVICE char const* key_row(
        AttentionArgs const& args, RowTile const& tile, char const* cache, int32_t key)
    {
        int64_t const at = (static_cast<int64_t>(cell_of(args, tile, key)) * args.n_kv_heads + block_y()) * kHeadDim;
        return cache + at * kElementBytes;
    }

    static WMTP_DEVICE void load_keys(
        AttentionArgs const& args, RowTile const& tile, Lane const& me, int32_t first_key, Keys& keys)
    {
        WMTP_UNROLL
        for (int n = 0; n < 2; ++n)
        {
            int32_t const key = first_key + me.warp * 16 + n * 8 + me.g;
            if (key < tile.keys.count)
            {
                char const* const row = key_row(args, tile, args.k_cache, key) + me.t * 16;
                WMTP_UNROLL
                for (int i = 0; i < kKeyLoads; ++i)
                {
                    keys.raw[n][i] = load_16_bytes(row + i * 64);
                }
            }
            else
            {
                WMTP_UNROLL
                for (int i = 0; i < kKeyLoads; ++i)
                {
                    keys.raw[n][i] = Words4{};
                }
            }
        }
    }

    //! Keys nobody sees are zeros: a weight of zero times whatever lies in an unused cell might not be zero.
    static WMTP_DEVICE void load_values(
        AttentionArgs const& args, RowTile const& tile, Lane const& me, int32_t first_key, Values& values)
    {
        WMTP_UNROLL
        for (int step = 0; step < kValueSteps; ++step)
        {
            WMTP_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                int32_t const key = first_key + (me.key_group * kValueSteps + step) * 16 + 2 * me.t + i % 2 + i / 2 * 8;
                values.raw[step][i] = ValueWords{};
                if (key < tile.keys.count)
                {
                    char const* const at =
                        key_row(args, tile, args.v_cache, key) + (me.dim_group * 64 + me.g * 8) * kElementBytes;
                    if constexpr (kCache8)
                    {
                        values.raw[step][i] = load_8_bytes(at);
                    }
                    else
                    {
                        values.raw[step][i] = load_16_bytes(at);
                    }
                }
            }
        }
    }

    //! Words of step 2 * part + odd of a key's row.
    static WMTP_DEVICE void key_fragment(Words4 const (&raw)[kKeyLoads], int part, int odd, uint32_t (&b)[2])
    {
        if constexpr (kCache8)
        {
            Words2 const pairs = expand_e4m3<kRow>(raw[part / 2].w[part % 2 * 2 + odd]);
            b[0] = pairs.w[0];
            b[1] = pairs.w[1];
        }
        else
        {
            b[0] = raw[part].w[odd * 2];
            b[1] = raw[part].w[odd * 2 + 1];
        }
    }

    static WMTP_DEVICE void score(Shared const& shared, Lane const& me, Keys const& keys, float (&scores)[2][4])
    {
        WMTP_UNROLL
        for (int n = 0; n < 2; ++n)
        {
            WMTP_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                scores[n][i] = 0.0F;
            }
        }
        WMTP_UNROLL
        for (int part = 0; part < kSteps / 2; ++part)
        {
            Words4 const low = shared.q[part][0][me.lane];
            Words4 const high = shared.q[part][1][me.lane];
            WMTP_UNROLL
            for (int odd = 0; odd < 2; ++odd)
            {
                uint32_t const a[4] = {low.w[odd * 2], high.w[odd * 2], low.w[odd * 2 + 1], high.w[odd * 2 + 1]};
                WMTP_UNROLL
                for (int n = 0; n < 2; ++n)
                {
                    uint32_t b[2];
                    key_fragment(keys.raw[n], part, odd, b);
                    tensor_core_step<kRow>(scores[n], a, b);
                }
            }
        }
    }

    //! Scores in units of log2; what a row does not see is -infinity.
    static WMTP_DEVICE void mask_scores(AttentionArgs const& args, RowTile const& tile, Shared const& shared,
        Lane const& me, int32_t first_key, float (&scores)[2][4])
    {
        bool const clear = tile.keys.clear_begin <= first_key && first_key + kTileKeys <= tile.keys.clear_end;
        WMTP_UNROLL
        for (int n = 0; n < 2; ++n)
        {
            WMTP_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                scores[n][i] *= args.scale_log2;
                if (!clear)
                {
                    int32_t const key = first_key + me.warp * 16 + n * 8 + 2 * me.t + i % 2;
                    int32_t const row = me.g + i / 2 * 8;
                    if (key >= tile.keys.count
                        || !sees(
                            tile.rule, shared.tile.position[row], tile.ancestors(args, row), tile.keys.position(key)))
                    {
                        scores[n][i] = negative_infinity();
                    }
                }
            }
        }
    }

    static WMTP_DEVICE void add_values(Shared const& shared, Lane const& me, Values const& values, float (&acc)[8][4])
    {
        WMTP_UNROLL
        for (int step = 0; step < kValueSteps; ++step)
        {
            uint32_t const* const weights =
                shared.weights + (me.key_group * kValueSteps + step) * 8 + me.t + me.g * kWeightStride;
            uint32_t const a[4] = {weights[0], weights[8 * kWeightStride], weights[4], weights[8 * kWeightStride + 4]};
            WMTP_UNROLL
            for (int pair = 0; pair < 4; ++pair) // dims 2 * pair and 2 * pair + 1 of a lane's eight
            {
                uint32_t words[4];
                WMTP_UNROLL
                for (int i = 0; i < 4; ++i)
                {
                    if constexpr (kCache8)
                    {
                        words[i] = expand_e4m3<kRow>(values.raw[step][i].w[pair / 2]).w[pair % 2];
                    }
                    else
                    {
                        words[i] = values.raw[step][i].w[pair];
                    }
                }
                uint32_t const even[2] = {
                    permute_bytes(words[0], words[1], 0x5410), permute_bytes(words[2], words[3], 0x5410)};
                uint32_t const odd[2] = {
                    permute_bytes(words[0], words[1], 0x7632), permute_bytes(words[2], words[3], 0x7632)};
                tensor_core_step<kRow>(acc[2 * pair], a, even);
                tensor_core_step<kRow>(acc[2 * pair + 1], a, odd);
            }
        }
    }

    static WMTP_DEVICE float quad_max(float value)
    {
        value = maximum(value, shuffle_xor(value, 1));
        return maximum(value, shuffle_xor(value, 2));
    }

    static WMTP_DEVICE float quad_sum(float value)
    {
        value += shuffle_xor(value, 1);
        return value + shuffle_xor(value, 2);
    }

    //! Sums the accumulators of the key groups into those of the first.
    static WMTP_DEVICE void add_key_groups(Shared& shared, Lane const& me, float (&acc)[8][4])
    {
        if constexpr (kKeyGroups > 1)
        {
            if (me.key_group > 0)
            {
                WMTP_UNROLL
                for (int i = 0; i < 32; ++i)
                {
                    shared.acc[(me.key_group - 1) * kDimGroups + me.dim_group][i][me.lane] = acc[i / 4][i % 4];
                }
            }
            sync_block();
            if (me.key_group == 0)
            {
                WMTP_UNROLL
                for (int i = 0; i < 32; ++i)
                {
                    WMTP_UNROLL
                    for (int group = 1; group < kKeyGroups; ++group)
                    {
                        acc[i / 4][i % 4] += shared.acc[(group - 1) * kDimGroups + me.dim_group][i][me.lane];
                    }
                }
            }
        }
    }

    //! A lane has 16 consecutive dims of rows g and g + 8: those of its even columns, then those of its odd ones.
    static WMTP_DEVICE void write_rows(AttentionArgs const& args, RowTile const& tile, Lane const& me,
        float const (&maxima)[2], float const (&sums)[2], float const (&acc)[8][4])
    {
        WMTP_UNROLL
        for (int half = 0; half < 2; ++half)
        {
            int32_t const row = me.g + 8 * half;
            if (!tile.has(row))
            {
                continue;
            }
            int64_t const query_head = tile.query_head(args, block_y(), row);
            int64_t const dim = me.dim_group * 64 + me.t * 16;
            if (args.n_splits == 1)
            {
                float const factor = args.v_scale / sums[half];
                WMTP_UNROLL
                for (int odd = 0; odd < 2; ++odd)
                {
                    Words4 words;
                    WMTP_UNROLL
                    for (int i = 0; i < 4; ++i)
                    {
                        words.w[i] = pack_pair<kRow>(
                            acc[2 * i][2 * half + odd] * factor, acc[2 * i + 1][2 * half + odd] * factor);
                    }
                    store_16_bytes(static_cast<uint16_t*>(args.out) + query_head * kHeadDim + dim + odd * 8, words);
                }
                continue;
            }
            int64_t const at = args.state_index(block_z(), query_head);
            WMTP_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                Floats4 part;
                WMTP_UNROLL
                for (int j = 0; j < 4; ++j)
                {
                    part.f[j] = acc[(i * 4 + j) % 8][2 * half + i / 2];
                }
                store_floats(args.partial_acc + at * kHeadDim + dim + i * 4, part);
            }
            if (me.t == 0 && me.dim_group == 0)
            {
                args.partial_state[2 * at] = maxima[half];
                args.partial_state[2 * at + 1] = sums[half];
            }
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
        Lane const me = this_lane();
        Keys keys;
        Values values;
        load_keys(args, tile, me, range.begin * kTileKeys, keys);
        load_values(args, tile, me, range.begin * kTileKeys, values);
        share_queries(args, tile, shared);
        sync_block();

        float acc[8][4];
        WMTP_UNROLL
        for (int i = 0; i < 32; ++i)
        {
            acc[i / 4][i % 4] = 0.0F;
        }
        float maxima[2] = {negative_infinity(), negative_infinity()}; // of rows g and g + 8, the same in every warp
        float sums[2] = {0.0F, 0.0F};                                 // of this lane's own columns
        for (int32_t at = range.begin; at < range.end; ++at)
        {
            float scores[2][4];
            score(shared, me, keys, scores);
            bool const more = at + 1 < range.end;
            if (more)
            {
                load_keys(args, tile, me, (at + 1) * kTileKeys, keys);
            }
            mask_scores(args, tile, shared, me, at * kTileKeys, scores);
            WMTP_UNROLL
            for (int half = 0; half < 2; ++half)
            {
                float const highest = quad_max(maximum(maximum(scores[0][2 * half], scores[0][2 * half + 1]),
                    maximum(scores[1][2 * half], scores[1][2 * half + 1])));
                if (me.t == 0)
                {
                    shared.tile_max[me.warp][me.g + 8 * half] = highest;
                }
            }
            sync_block();
            WMTP_UNROLL
            for (int half = 0; half < 2; ++half)
            {
                int32_t const row = me.g + 8 * half;
                float highest = maxima[half];
                WMTP_UNROLL
                for (int warp = 0; warp < 4; ++warp)
                {
                    highest = maximum(highest, shared.tile_max[warp][row]);
                }
                // A row that has seen nothing yet subtracts zero, so that no infinities meet.
                float const reference = highest == negative_infinity() ? 0.0F : highest;
                float const decay = exp2_fast(maxima[half] - reference);
                maxima[half] = highest;
                float sum = 0.0F;
                WMTP_UNROLL
                for (int n = 0; n < 2; ++n)
                {
                    float const low = exp2_fast(scores[n][2 * half] - reference);
                    float const high = exp2_fast(scores[n][2 * half + 1] - reference);
                    sum += low + high;
                    shared.weights[row * kWeightStride + me.warp * 8 + n * 4 + me.t] = pack_pair<kRow>(low, high);
                }
                sums[half] = sums[half] * decay + sum;
                WMTP_UNROLL
                for (int i = 0; i < 8; ++i)
                {
                    acc[i][2 * half] *= decay;
                    acc[i][2 * half + 1] *= decay;
                }
            }
            sync_block();
            add_values(shared, me, values, acc);
            if (more)
            {
                load_values(args, tile, me, (at + 1) * kTileKeys, values);
            }
        }

        WMTP_UNROLL
        for (int half = 0; half < 2; ++half)
        {
            float const sum = quad_sum(sums[half]);
            if (me.t == 0)
            {
                shared.sum[me.warp][me.g + 8 * half] = sum;
            }
        }
        sync_block();
        WMTP_UNROLL
        for (int half = 0; half < 2; ++half)
        {
            int32_t const row = me.g + 8 * half;
            sums[half] = shared.sum[0][row] + shared.sum[1][row] + shared.sum[2][row] + shared.sum[3][row];
        }
        add_key_groups(shared, me, acc);
        if (me.key_group == 0)
        {
            write_rows(args, tile, me, maxima, sums, acc);
        }
    }
};

} // namespace wmtp::cuda
