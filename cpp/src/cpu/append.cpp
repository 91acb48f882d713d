#include "append.hpp"

#include <cstring>

#include "checks.hpp"
#include "wmtp/ring.hpp"

namespace wmtp
{
namespace cpu
{
namespace
{
#include "bf16.inl"

size_t bytes_per_element(DType dtype)
{
    return dtype == DType::kFloat32 ? 4 : 2;
}

//! Copies `n` elements from index `from` of one tensor to index `to` of the other, converting where they differ.
void copy_elements(ConstTensor source, int64_t from, MutableTensor target, int64_t to, int64_t n)
{
    size_t const source_bytes = bytes_per_element(source.dtype);
    size_t const target_bytes = bytes_per_element(target.dtype);
    char const* const in = static_cast<char const*>(source.data) + static_cast<size_t>(from) * source_bytes;
    char* const out = static_cast<char*>(target.data) + static_cast<size_t>(to) * target_bytes;
    if (source.dtype == target.dtype)
    {
        std::memcpy(out, in, static_cast<size_t>(n) * source_bytes);
        return;
    }
    if (source.dtype == DType::kFloat32)
    {
        for (int64_t i = 0; i < n; ++i)
        {
            reinterpret_cast<uint16_t*>(out)[i] = bf16_from_float(reinterpret_cast<float const*>(in)[i]);
        }
        return;
    }
    for (int64_t i = 0; i < n; ++i)
    {
        reinterpret_cast<float*>(out)[i] = float_from_bf16(reinterpret_cast<uint16_t const*>(in)[i]);
    }
}

void store_segment(AppendRows const& append, int64_t row_elements, int64_t first_row, MutableTensor k, MutableTensor v,
    int64_t first_cell, int64_t count)
{
    int64_t const n = count * row_elements;
    copy_elements(append.k, first_row * row_elements, k, first_cell * row_elements, n);
    copy_elements(append.v, first_row * row_elements, v, first_cell * row_elements, n);
}

void store_ring_range(AppendRows const& append, int64_t row_elements, RingCache const& ring, RingMap map, int32_t lane,
    int32_t request, PositionRange range)
{
    SlotSegment segments[2];
    int32_t const n_segments = map.segments(range, segments);
    for (int32_t i = 0; i < n_segments; ++i)
    {
        int64_t const row = append.rows.offsets[request] + segments[i].first_position - append.start_positions[request];
        int64_t const cell = lane * ring.capacity + segments[i].first_slot;
        store_segment(append, row_elements, row, ring.k, ring.v, cell, segments[i].count);
    }
}

} // namespace

void check_append(AppendRows const& append, HeadShape heads)
{
    check_heads(heads);
    check_ragged("row_offsets", append.rows);
    check_positions("start_positions", append.start_positions, append.rows.n_requests);
}

void store_ring_rows(AppendRows const& append, HeadShape heads, RingCache const& ring, int32_t const* lanes)
{
    RingMap const map{ring.n_sink, ring.capacity};
    int64_t const row_elements = static_cast<int64_t>(heads.n_kv_heads) * heads.head_dim;
    for (int32_t b = 0; b < append.rows.n_requests; ++b)
    {
        int64_t const n_rows = append.rows.offsets[b + 1] - append.rows.offsets[b];
        Survivors const kept = survivors(map, append.start_positions[b], n_rows);
        store_ring_range(append, row_elements, ring, map, lanes[b], b, kept.sink);
        store_ring_range(append, row_elements, ring, map, lanes[b], b, kept.tail);
    }
}

} // namespace cpu

void ring_append(
    AppendRows const& append, HeadShape heads, RingCache const& ring, int32_t const* lanes, int /*n_threads*/)
{
    cpu::check_append(append, heads);
    cpu::check_ring(ring, lanes, append.rows.n_requests);
    cpu::store_ring_rows(append, heads, ring, lanes);
}

void paged_append(AppendRows const& append, HeadShape heads, PagedCache const& pages, int /*n_threads*/)
{
    cpu::check_append(append, heads);
    for (int32_t b = 0; b < append.rows.n_requests; ++b)
    {
        int64_t const start = append.start_positions[b];
        cpu::check_pages(pages, b, start, start + append.rows.offsets[b + 1] - append.rows.offsets[b]);
    }
    int64_t const row_elements = static_cast<int64_t>(heads.n_kv_heads) * heads.head_dim;
    for (int32_t b = 0; b < append.rows.n_requests; ++b)
    {
        int32_t const* const table = pages.block_table + b * pages.max_pages;
        int64_t position = append.start_positions[b];
        int64_t const end_row = append.rows.offsets[b + 1];
        for (int64_t row = append.rows.offsets[b]; row < end_row;)
        {
            int64_t const page = position / pages.page_size;
            int64_t const inside = position - page * pages.page_size;
            int64_t const left = end_row - row;
            int64_t const count = left < pages.page_size - inside ? left : pages.page_size - inside;
            cpu::store_segment(
                append, row_elements, row, pages.k, pages.v, table[page] * pages.page_size + inside, count);
            row += count;
            position += count;
        }
    }
}

} // namespace wmtp
