#pragma once

// The query rows of a block: which request they belong to, their positions, and the keys they read between them.

#include "arguments.hpp"
#include "device.hpp"

namespace wmtp::cuda
{

constexpr int32_t kAttendThreads = 128; //!< of every kernel that opens row tiles

struct RowTileShared
{
    int32_t request;
    int32_t tile;
    int64_t position[kTileRows]; //!< of each row; rows past the last repeat it
};

struct RowTile
{
    int32_t request;
    int32_t first_query; //!< of the request, in q
    int32_t first_row;   //!< row r is query r / group, head r % group of its KV head
    int32_t n_rows;      //!< rows of the whole request; 0 when the block has nothing to do
    VisibilityRule rule;
    KeyList keys;

    //! Index of a row in [n_queries, n_query_heads]; the row exists if `has(row)`.
    WMTP_DEVICE int64_t query_head(AttentionArgs const& args, int32_t kv_head, int32_t row) const
    {
        int32_t const at = first_row + row;
        return static_cast<int64_t>(first_query + at / args.group) * args.n_query_heads + kv_head * args.group
            + at % args.group;
    }

    WMTP_DEVICE bool has(int32_t row) const
    {
        return first_row + row < n_rows;
    }

    //! The row's words of the ancestor mask, or null.
    WMTP_DEVICE uint32_t const* ancestors(AttentionArgs const& args, int32_t row) const
    {
        if (args.ancestor_mask == nullptr)
        {
            return nullptr;
        }
        int32_t const last = n_rows - 1;
        int32_t const at = first_row + row < last ? first_row + row : last;
        return args.ancestor_mask + static_cast<int64_t>(first_query + at / args.group) * args.mask_words;
    }
};

//! Cell of a key: the one place where rings and pages differ.
WMTP_DEVICE int32_t cell_of(AttentionArgs const& args, RowTile const& tile, int32_t key)
{
    if (args.query_positions == nullptr)
    {
        return tile.keys.ring_cell(key);
    }
    int32_t const page = key / args.page_size;
    int32_t const* const table = args.block_table + static_cast<int64_t>(tile.request) * args.max_pages;
    return table[page] * args.page_size + (key - page * args.page_size);
}

//! Position of query `query` of the request, counted from its first.
WMTP_DEVICE int64_t query_position(
    AttentionArgs const& args, int32_t request, int32_t first_query, int32_t n_queries, int32_t query)
{
    if (args.query_positions != nullptr)
    {
        return args.query_positions[first_query + query];
    }
    int64_t const start = args.start_positions[request];
    int32_t const n_appended = args.row_offsets[request + 1] - args.row_offsets[request];
    if (args.ancestor_mask == nullptr)
    {
        return start + n_appended - n_queries + query;
    }
    int32_t const n_bits = n_appended < args.mask_words * 32 ? n_appended : args.mask_words * 32;
    uint32_t const* const words = args.ancestor_mask + static_cast<int64_t>(first_query + query) * args.mask_words;
    return tree_position(words, start, n_bits);
}

//! Called by every thread of the block; the block's x index is the number of its row tile.
WMTP_DEVICE RowTile open_row_tile(AttentionArgs const& args, RowTileShared& shared)
{
    RowTile tile{};
    int32_t const thread = thread_index();
    if (thread == 0)
    {
        shared.request = -1;
    }
    sync_block();
    for (int32_t b = thread; b < args.n_requests; b += kAttendThreads)
    {
        int32_t const begin = first_row_tile(args.query_offsets[b], args.group, b);
        int32_t const end = first_row_tile(args.query_offsets[b + 1], args.group, b + 1);
        if (begin <= block_x() && block_x() < end)
        {
            shared.request = b;
            shared.tile = block_x() - begin;
        }
    }
    sync_block();
    tile.request = shared.request;
    if (tile.request < 0)
    {
        return tile; // a launch for more rows than there are
    }
    tile.first_query = args.query_offsets[tile.request];
    int32_t const n_queries = args.query_offsets[tile.request + 1] - tile.first_query;
    int32_t const n_rows = n_queries * args.group;
    tile.first_row = shared.tile * kTileRows;
    if (tile.first_row >= n_rows)
    {
        return tile;
    }
    tile.n_rows = n_rows;
    if (thread < kTileRows)
    {
        int32_t const row = tile.first_row + thread < n_rows ? tile.first_row + thread : n_rows - 1;
        shared.position[thread] = query_position(args, tile.request, tile.first_query, n_queries, row / args.group);
    }
    sync_block();
    TileQueries queries{shared.position[0], shared.position[0], 0, args.ancestor_mask != nullptr};
    for (int32_t row = 1; row < kTileRows; ++row)
    {
        queries.first = smaller(queries.first, shared.position[row]);
        queries.last = larger(queries.last, shared.position[row]);
    }
    queries.end = queries.last + 1;
    tile.rule = VisibilityRule{args.n_sink, args.window, 0};
    bool const is_ring = args.query_positions == nullptr;
    int32_t first_cell = 0;
    if (is_ring)
    {
        tile.rule.appended_begin = args.start_positions[tile.request];
        first_cell = static_cast<int32_t>(args.lanes[tile.request] * args.capacity);
        if (queries.has_mask)
        {
            queries.end =
                tile.rule.appended_begin + args.row_offsets[tile.request + 1] - args.row_offsets[tile.request];
        }
    }
    tile.keys = list_keys(tile.rule, queries, is_ring, args.capacity, first_cell);
    return tile;
}

//! Tells the merge that this split saw nothing. Its accumulators stay unwritten.
WMTP_DEVICE void leave_empty_split(AttentionArgs const& args, RowTile const& tile)
{
    int32_t const row = thread_index();
    if (args.n_splits > 1 && row < kTileRows && tile.has(row))
    {
        float* const state =
            args.partial_state + 2 * args.state_index(block_z(), tile.query_head(args, block_y(), row));
        state[0] = negative_infinity();
        state[1] = 0.0F;
    }
}

} // namespace wmtp::cuda
