#pragma once

// Which keys a tile of query rows reads, where they lie, how they are shared out over splits, and who sees what.
// Host and device alike.

#include <cstdint>

#include "wmtp/ancestors.hpp"
#include "wmtp/platform.hpp"
#include "wmtp/ring.hpp"

namespace wmtp::cuda
{

constexpr int32_t kTileKeys = 64; //!< keys a block takes at a time
constexpr int32_t kTileRows = 16; //!< (query row, query head) pairs a block answers: the m of one tensor core step
constexpr int32_t kMaxSplits = 256;

//! Window of full attention: longer than any sequence, and safe to subtract.
constexpr int64_t kEverything = INT64_MAX / 4;

WMTP_HD int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

WMTP_HD int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

//! First row tile of request b. Tiles of all requests are numbered through without a scan: each request takes at
//! least as many numbers as it has tiles, and the few left over belong to blocks that return at once.
WMTP_HD int32_t first_row_tile(int32_t query_offset, int32_t group, int32_t request)
{
    return static_cast<int32_t>(static_cast<int64_t>(query_offset) * group / kTileRows) + request;
}

//! A range of key tiles.
struct TileRange
{
    int32_t begin;
    int32_t end;
};

//! Split `index` of `n_splits`: sizes differ by at most one.
WMTP_HD TileRange split_tiles(int32_t n_tiles, int32_t index, int32_t n_splits)
{
    int64_t const n = n_tiles;
    return TileRange{static_cast<int32_t>(n * index / n_splits), static_cast<int32_t>(n * (index + 1) / n_splits)};
}

//! What decides whether a row sees a position.
struct VisibilityRule
{
    int64_t n_sink;
    int64_t window;
    int64_t appended_begin; //!< with an ancestor mask: positions from here on are decided by it
};

WMTP_HD bool sees(VisibilityRule rule, int64_t query, uint32_t const* ancestors, int64_t position)
{
    if (ancestors != nullptr && position >= rule.appended_begin)
    {
        return is_ancestor(ancestors, position - rule.appended_begin);
    }
    return position <= query && (position < rule.n_sink || position > query - rule.window);
}

//! Positions that the rows of a tile see between them.
struct TileQueries
{
    int64_t first; //!< smallest position of a row, see query_position
    int64_t last;  //!< largest
    int64_t end;   //!< no row sees a position from here on
    bool has_mask;
};

//! The keys of a tile as one list without gaps: sinks first, then the window. Key i is position
//! `i + (i < n_sinks ? 0 : window_shift)`, in cell `i + base` of the segment that holds it.
struct KeyList
{
    int32_t count;
    int32_t n_sinks;
    int64_t window_shift;
    int32_t end[2];      //!< keys before end[0] lie in segment 0, before end[1] in segment 1, the others in segment 2
    int32_t base[3];     //!< cell - i
    int32_t clear_begin; //!< keys in [clear_begin, clear_end) are seen by every row
    int32_t clear_end;

    WMTP_HD int64_t position(int32_t key) const
    {
        return key + (key < n_sinks ? 0 : window_shift);
    }

    WMTP_HD int32_t ring_cell(int32_t key) const
    {
        return key + (key < end[0] ? base[0] : key < end[1] ? base[1] : base[2]);
    }

    WMTP_HD int32_t n_tiles() const
    {
        return (count + kTileKeys - 1) / kTileKeys;
    }
};

//! Cells are numbered through all lanes; `first_cell` is the lane's. Pages have a table instead: their cells are not
//! used and `is_ring` is false.
WMTP_HD KeyList list_keys(VisibilityRule rule, TileQueries queries, bool is_ring, int64_t capacity, int32_t first_cell)
{
    VisibleRanges const ranges = visible_ranges(rule.n_sink, rule.window, queries.first);
    int64_t begin = ranges.window.begin;
    int64_t clear_last = queries.first;
    if (queries.has_mask)
    {
        begin = smaller(begin, rule.appended_begin);
        clear_last = smaller(clear_last, rule.appended_begin - 1);
    }
    bool const merged = begin <= rule.n_sink;
    KeyList keys{};
    keys.n_sinks = merged ? 0 : static_cast<int32_t>(rule.n_sink);
    begin = merged ? 0 : begin;
    keys.window_shift = begin - keys.n_sinks;
    keys.count = static_cast<int32_t>(keys.n_sinks + queries.end - begin);

    int64_t const clear_first = queries.last - rule.window + 1;
    keys.clear_begin =
        clear_first <= begin ? 0 : static_cast<int32_t>(smaller(clear_first - keys.window_shift, keys.count));
    keys.clear_end = static_cast<int32_t>(larger(clear_last + 1 - keys.window_shift, 0));

    if (is_ring)
    {
        SlotSegment segments[2] = {};
        int32_t const n_segments = RingMap{rule.n_sink, capacity}.segments(PositionRange{begin, queries.end}, segments);
        keys.end[0] = keys.n_sinks;
        keys.base[0] = first_cell;
        keys.end[1] = static_cast<int32_t>(keys.n_sinks + segments[0].count);
        keys.base[1] = static_cast<int32_t>(first_cell + segments[0].first_slot - keys.n_sinks);
        keys.base[2] = n_segments < 2 ? 0 : static_cast<int32_t>(first_cell + segments[1].first_slot - keys.end[1]);
    }
    return keys;
}

} // namespace wmtp::cuda
