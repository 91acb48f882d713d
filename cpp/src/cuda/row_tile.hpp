#pragma once

// The query rows of a block: which request they belong to, their positions, and the keys they read between them.

#include "arguments.hpp"
#include "device.hpp"

namespace wmtp::cuda
{

constexpr int32_t kAttendThreads = 128; //!< of every kernel that opens row tiles

//! What the device arrays say about one request.
struct RequestFacts
{
    int64_t start;      //!< ring, and pages with an ancestor mask
    int32_t n_appended; //!< ring only, like the next
    int32_t lane;
    int32_t first_query;
    int32_t n_queries;
};

struct RowTileShared
{
    RequestFacts facts;
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

//! All reads at once: none of them waits for another.
WMTP_DEVICE RequestFacts read_facts(AttentionArgs const& args, int32_t request)
{
    RequestFacts facts{};
    facts.first_query = args.query_offsets[request];
    facts.n_queries = args.query_offsets[request + 1] - facts.first_query;
    if (args.query_positions == nullptr)
    {
        facts.start = args.start_positions[request];
        facts.n_appended = args.row_offsets[request + 1] - args.row_offsets[request];
        facts.lane = args.lanes[request];
    }
    else if (args.ancestor_mask != nullptr)
    {
        facts.start = args.start_positions[request];
    }
    return facts;
}

//! Position of query `query` of the request, counted from its first. Of a tree row it is the logical one in a ring,
//! where the window hangs on it, and the last that it sees in pages, where nothing else ends its keys.
WMTP_DEVICE int64_t query_position(AttentionArgs const& args, RequestFacts const& facts, int32_t query)
{
    int64_t const row = facts.first_query + query;
    bool const is_ring = args.query_positions == nullptr;
    if (args.ancestor_mask == nullptr)
    {
        return is_ring ? facts.start + facts.n_appended - facts.n_queries + query : args.query_positions[row];
    }
    uint32_t const* const ancestors = args.ancestor_mask + row * args.mask_words;
    int32_t const n_bits = args.mask_words * kAncestorWordBits;
    return facts.start - 1
        + (is_ring ? count_ancestors(ancestors, facts.n_appended < n_bits ? facts.n_appended : n_bits)
                   : ancestors_end(ancestors, args.mask_words));
}

//! Finds the request that owns this block's row tile, every thread looking at other requests.
WMTP_DEVICE void find_request(AttentionArgs const& args, RowTileShared& shared)
{
    int32_t const thread = thread_index();
    if (thread == 0)
    {
        shared.request = -1;
    }
    // Read before the barrier, so that the facts are there when the request is known: at batch 1 a block waits for
    // memory once before it asks for keys, not twice.
    RequestFacts facts = read_facts(args, thread < args.n_requests ? thread : args.n_requests - 1);
    sync_block();
    for (int32_t b = thread; b < args.n_requests; b += kAttendThreads)
    {
        if (b != thread)
        {
            facts = read_facts(args, b);
        }
        int32_t const begin = first_row_tile(facts.first_query, args.group, b);
        int32_t const end = first_row_tile(facts.first_query + facts.n_queries, args.group, b + 1);
        if (begin <= block_x() && block_x() < end)
        {
            shared.request = b;
            shared.tile = block_x() - begin;
            shared.facts = facts;
        }
    }
    sync_block();
}

//! Called by every thread of the block; the block's x index is the number of its row tile.
WMTP_DEVICE RowTile open_row_tile(AttentionArgs const& args, RowTileShared& shared)
{
    find_request(args, shared);
    RowTile tile{};
    tile.request = shared.request;
    if (tile.request < 0)
    {
        return tile; // a launch for more rows than there are
    }
    RequestFacts const facts = shared.facts;
    tile.first_query = facts.first_query;
    tile.first_row = shared.tile * kTileRows;
    int32_t const n_rows = facts.n_queries * args.group;
    if (tile.first_row >= n_rows)
    {
        return tile;
    }
    tile.n_rows = n_rows;
    int32_t const thread = thread_index();
    if (thread < kTileRows)
    {
        int32_t const row = tile.first_row + thread < n_rows ? tile.first_row + thread : n_rows - 1;
        shared.position[thread] = query_position(args, facts, row / args.group);
    }
    sync_block();
    TileQueries queries{shared.position[0], shared.position[0], 0, args.ancestor_mask != nullptr};
    for (int32_t row = 1; row < kTileRows; ++row)
    {
        queries.first = smaller(queries.first, shared.position[row]);
        queries.last = larger(queries.last, shared.position[row]);
    }
    bool const is_ring = args.query_positions == nullptr;
    queries.end = queries.has_mask && is_ring ? facts.start + facts.n_appended : queries.last + 1;
    tile.rule = VisibilityRule{args.n_sink, args.window, facts.start};
    auto const first_cell = static_cast<int32_t>(facts.lane * args.capacity);
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
