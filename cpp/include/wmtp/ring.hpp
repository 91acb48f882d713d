#pragma once

// The ring: which slot holds a position, which positions a query sees, which rows of an append are stored.
//
// Words. A *position* is the absolute index of a token in its request. A *slot* is a cell of a lane. The first
// `n_sink` positions own the first `n_sink` slots for ever; later positions share the remaining `capacity - n_sink`
// slots round robin. Every reader and writer, on every device, goes through `RingMap`: there is no second modulo.

#include <cstdint>

#include "wmtp/platform.hpp"

namespace wmtp
{

//! A half-open range of positions.
struct PositionRange
{
    int64_t begin;
    int64_t end;

    WMTP_HD bool empty() const
    {
        return begin >= end;
    }
};

//! Consecutive positions that lie in consecutive slots.
struct SlotSegment
{
    int64_t first_position;
    int64_t first_slot;
    int64_t count;
};

struct RingMap
{
    int64_t n_sink;
    int64_t capacity; //!< n_sink + window + spare

    WMTP_HD int64_t slot(int64_t position) const
    {
        return position < n_sink ? position : n_sink + (position - n_sink) % (capacity - n_sink);
    }

    //! Positions [range.begin, range.end) as at most two segments. Requires that no two of them share a slot, and
    //! that the range does not straddle n_sink unless it ends before the first wrap.
    WMTP_HD int32_t segments(PositionRange range, SlotSegment out[2]) const
    {
        if (range.empty())
        {
            return 0;
        }
        int64_t const first = slot(range.begin);
        int64_t const total = range.end - range.begin;
        int64_t const until_wrap = capacity - first;
        int64_t const head = total < until_wrap ? total : until_wrap;
        out[0] = SlotSegment{range.begin, first, head};
        if (head == total)
        {
            return 1;
        }
        out[1] = SlotSegment{range.begin + head, n_sink, total - head};
        return 2;
    }
};

//! What a query sees: the sinks and the most recent `window` positions, its own included.
struct VisibleRanges
{
    PositionRange sink;   //!< empty when merged into `window`
    PositionRange window; //!< never empty
};

WMTP_HD VisibleRanges visible_ranges(int64_t n_sink, int64_t window, int64_t query)
{
    int64_t const window_begin = query - window + 1;
    if (window_begin <= n_sink)
    {
        return VisibleRanges{PositionRange{0, 0}, PositionRange{0, query + 1}};
    }
    return VisibleRanges{PositionRange{0, n_sink}, PositionRange{window_begin, query + 1}};
}

//! Visible keys of one query as slots: one sink segment and at most two window segments.
struct VisiblePlan
{
    SlotSegment segments[3];
    int32_t n_segments;
};

WMTP_HD VisiblePlan visible_plan(RingMap map, int64_t window, int64_t query)
{
    VisiblePlan plan{};
    VisibleRanges const ranges = visible_ranges(map.n_sink, window, query);
    if (!ranges.sink.empty())
    {
        plan.segments[plan.n_segments++] = SlotSegment{0, 0, map.n_sink};
    }
    plan.n_segments += map.segments(ranges.window, plan.segments + plan.n_segments);
    return plan;
}

//! Rows of an append that are stored. Sinks always are; of the others only the last `capacity - n_sink`, so that one
//! launch writes each slot at most once whatever the number of rows.
struct Survivors
{
    PositionRange sink;
    PositionRange tail;
};

WMTP_HD Survivors survivors(RingMap map, int64_t start, int64_t n_rows)
{
    int64_t const end = start + n_rows;
    int64_t const sink_end = end < map.n_sink ? end : map.n_sink;
    int64_t tail_begin = end - (map.capacity - map.n_sink);
    tail_begin = tail_begin < start ? start : tail_begin;
    tail_begin = tail_begin < map.n_sink ? map.n_sink : tail_begin;
    return Survivors{PositionRange{start, sink_end}, PositionRange{tail_begin, end}};
}

//! Rows one launch may append and still answer its first query: the oldest key that query sees must not have been
//! overwritten by the newest row. (newest - (capacity - n_sink)) <= (query - window)  <=>  newest - query <= spare.
WMTP_HD bool append_keeps_window(RingMap map, int64_t window, int64_t first_query, int64_t newest)
{
    return newest - first_query <= map.capacity - map.n_sink - window;
}

} // namespace wmtp
