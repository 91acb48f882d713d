#include "checks.hpp"

#include <cmath>

namespace wmtp::cpu
{

void check_heads(HeadShape heads)
{
    require(heads.head_dim >= 8 && heads.head_dim % 8 == 0, "head_dim ", heads.head_dim,
        ": must be a positive multiple of 8; pad the heads");
    require(heads.n_kv_heads >= 1, "n_kv_heads ", heads.n_kv_heads, ": must be positive; pass at least one KV head");
    require(heads.n_query_heads % heads.n_kv_heads == 0, "n_query_heads ", heads.n_query_heads,
        " is no multiple of n_kv_heads ", heads.n_kv_heads, ": every KV head serves the same number of query heads");
}

void check_ragged(char const* name, RaggedRows rows)
{
    require(rows.offsets[0] == 0, name, "[0] is ", rows.offsets[0], ": must be 0; offsets start at the first row");
    for (int32_t b = 0; b < rows.n_requests; ++b)
    {
        require(rows.offsets[b] <= rows.offsets[b + 1], name, "[", b + 1, "] is ", rows.offsets[b + 1],
            ", less than the ", rows.offsets[b],
            " before it: offsets never decrease; pass a running sum of row counts");
    }
    require(rows.offsets[rows.n_requests] == rows.n_rows, name, " ends at ", rows.offsets[rows.n_requests], " but ",
        rows.n_rows, " rows were passed: the last offset is the number of rows");
}

void check_positions(char const* name, int64_t const* positions, int64_t n)
{
    for (int64_t i = 0; i < n; ++i)
    {
        require(positions[i] >= 0, name, "[", i, "] is ", positions[i],
            ": must be >= 0; positions count from the first token of the request");
    }
}

void check_scale(float scale)
{
    require(std::isfinite(scale) && scale > 0.0F, "scale ", scale,
        ": must be positive and finite; head_dim ** -0.5 is usual");
}

void check_ring(RingCache const& ring, int32_t const* lanes, int32_t n_requests)
{
    require(ring.n_sink >= 0, "n_sink ", ring.n_sink, ": must be >= 0; pass 0 for no sinks");
    require(ring.capacity > ring.n_sink, "ring capacity ", ring.capacity, " <= n_sink ", ring.n_sink,
        ": the window needs slots of its own; allocate n_sink + window + spare slots");
    for (int32_t b = 0; b < n_requests; ++b)
    {
        require(lanes[b] >= 0 && lanes[b] < ring.n_lanes, "lanes[", b, "] is ", lanes[b], ": must lie in [0, ",
            ring.n_lanes, "); pass the lane that the pool handed out");
        for (int32_t other = 0; other < b; ++other)
        {
            require(lanes[other] != lanes[b], "lanes[", other, "] and lanes[", b, "] are both ", lanes[b],
                ": a lane belongs to one request; acquire one lane for each");
        }
    }
}

void check_pages(PagedCache const& pages, int32_t request, int64_t begin, int64_t end)
{
    int64_t const n_used = (end + pages.page_size - 1) / pages.page_size;
    require(n_used <= pages.max_pages, "request ", request, " reaches position ", end - 1, " but its block table has ",
        pages.max_pages, " pages of ", pages.page_size, ": widen block_table");
    int32_t const* const table = pages.block_table + request * pages.max_pages;
    for (int64_t i = begin / pages.page_size; i < n_used; ++i)
    {
        require(table[i] >= 0 && table[i] < pages.n_pages, "block_table[", request, ", ", i, "] is ", table[i],
            ": must lie in [0, ", pages.n_pages, ") up to position ", end - 1, "; allocate the page first");
    }
}

} // namespace wmtp::cpu
