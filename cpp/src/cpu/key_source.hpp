#pragma once

// Where the keys of a request lie, and which of them a row sees. Both caches look alike from here: the kernels are
// given pointers to token rows.

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "wmtp/ancestors.hpp"
#include "wmtp/attention.hpp"
#include "wmtp/ring.hpp"

namespace wmtp::cpu
{

//! A run of positions in consecutive cells, a cell being one token row of the cache.
struct CellRun
{
    int64_t cell;
    int64_t count;
};

struct KeySource
{
    char const* k;
    char const* v;
    size_t token_bytes;
    RingMap map;          //!< ring only
    int64_t lane_cell;    //!< ring only: first cell of the lane
    int32_t const* table; //!< pages only; null for a ring
    int64_t page_size;    //!< pages only

    CellRun run_at(int64_t position) const
    {
        if (table != nullptr)
        {
            int64_t const page = position / page_size;
            int64_t const inside = position - page * page_size;
            return CellRun{table[page] * page_size + inside, page_size - inside};
        }
        int64_t const slot = map.slot(position);
        return CellRun{lane_cell + slot, (slot < map.n_sink ? map.n_sink : map.capacity) - slot};
    }
};

//! Which keys one query row sees.
struct RowRule
{
    int64_t query;             //!< logical position; of a tree row over pages the last position it sees
    PositionRange appended;    //!< tree rows only: positions whose visibility the ancestor bits decide
    uint32_t const* ancestors; //!< null for a chain row
};

struct VisibilityRule
{
    int64_t n_sink;
    int64_t window; //!< at least the sequence length for full attention
};

//! Bits of the positions of [begin, end) in the block that starts at `block`.
inline uint64_t range_bits(int64_t begin, int64_t end, int64_t block)
{
    int64_t const low = begin > block ? begin - block : 0;
    int64_t const high = end - block < kBlockKeys ? end - block : kBlockKeys;
    if (low >= high)
    {
        return 0;
    }
    uint64_t const below_high = high == kBlockKeys ? ~uint64_t{0} : (uint64_t{1} << high) - 1;
    return below_high & ~((uint64_t{1} << low) - 1);
}

inline uint64_t visible_bits(RowRule const& row, VisibilityRule rule, int64_t block)
{
    VisibleRanges const ranges = visible_ranges(rule.n_sink, rule.window, row.query);
    uint64_t bits = range_bits(ranges.sink.begin, ranges.sink.end, block)
        | range_bits(ranges.window.begin, ranges.window.end, block);
    if (row.ancestors == nullptr)
    {
        return bits;
    }
    bits &= range_bits(0, row.appended.begin, block);
    int64_t const begin = row.appended.begin > block ? row.appended.begin : block;
    int64_t const end = row.appended.end < block + kBlockKeys ? row.appended.end : block + kBlockKeys;
    for (int64_t position = begin; position < end; ++position)
    {
        uint64_t const bit = is_ancestor(row.ancestors, position - row.appended.begin) ? 1 : 0;
        bits |= bit << (position - block);
    }
    return bits;
}

} // namespace wmtp::cpu
