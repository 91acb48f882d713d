// The Python module. Tensors arrive as addresses and shapes that tllm_wmtp/ops has checked: an address costs a tenth
// of a DLPack exchange, and no torch header is needed. What the integers inside tensors say is checked in C++.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "wmtp/attention.hpp"
#include "wmtp/gated_delta.hpp"
#include "wmtp/host.hpp"
#include "wmtp/lane_pool.hpp"
#include "wmtp/ring.hpp"

namespace nb = nanobind;

namespace
{

using Address = uintptr_t;

template <class T>
T* at(Address address)
{
    return reinterpret_cast<T*>(address); // NOLINT: the whole point of this file
}

wmtp::DType dtype(int code)
{
    return static_cast<wmtp::DType>(code);
}

nb::list segments(wmtp::SlotSegment const* first, int32_t n)
{
    nb::list out;
    for (int32_t i = 0; i < n; ++i)
    {
        out.append(nb::make_tuple(first[i].first_position, first[i].first_slot, first[i].count));
    }
    return out;
}

nb::tuple range(wmtp::PositionRange positions)
{
    return positions.empty() ? nb::make_tuple(0, 0) : nb::make_tuple(positions.begin, positions.end);
}

void bind_ring(nb::module_& m)
{
    m.def("ring_slot", [](int64_t n_sink, int64_t capacity, int64_t position)
        { return wmtp::RingMap{n_sink, capacity}.slot(position); });
    m.def("ring_survivors",
        [](int64_t n_sink, int64_t capacity, int64_t start, int64_t n_rows)
        {
            wmtp::Survivors const kept = wmtp::survivors(wmtp::RingMap{n_sink, capacity}, start, n_rows);
            return nb::make_tuple(range(kept.sink), range(kept.tail));
        });
    m.def("ring_visible_ranges",
        [](int64_t n_sink, int64_t window, int64_t query)
        {
            wmtp::VisibleRanges const ranges = wmtp::visible_ranges(n_sink, window, query);
            return nb::make_tuple(range(ranges.sink), range(ranges.window));
        });
    m.def("ring_visible_segments",
        [](int64_t n_sink, int64_t capacity, int64_t window, int64_t query)
        {
            wmtp::VisiblePlan const plan = wmtp::visible_plan(wmtp::RingMap{n_sink, capacity}, window, query);
            return segments(plan.segments, plan.n_segments);
        });

    nb::class_<wmtp::LaneHandle>(m, "Lane")
        .def_ro("index", &wmtp::LaneHandle::lane)
        .def_ro("generation", &wmtp::LaneHandle::generation)
        .def("__repr__",
            [](wmtp::LaneHandle const& lane)
            {
                return "Lane(index=" + std::to_string(lane.lane) + ", generation=" + std::to_string(lane.generation)
                    + ")";
            });
    nb::class_<wmtp::LanePool>(m, "LanePool")
        .def(nb::init<int32_t>(), nb::arg("n_lanes"))
        .def_prop_ro("n_lanes", &wmtp::LanePool::n_lanes)
        .def_prop_ro("n_free", &wmtp::LanePool::n_free)
        .def("can_acquire", &wmtp::LanePool::can_acquire)
        .def("acquire", &wmtp::LanePool::acquire)
        .def("release", &wmtp::LanePool::release, nb::arg("lane"))
        .def("length", &wmtp::LanePool::length, nb::arg("lane"))
        .def("extend", &wmtp::LanePool::extend, nb::arg("lane"), nb::arg("n_rows"))
        .def("rollback", &wmtp::LanePool::rollback, nb::arg("lane"), nb::arg("length"));
}

wmtp::AppendRows append_rows(Address k, Address v, int row_dtype, Address row_offsets, int32_t n_requests,
    int64_t n_rows, Address start_positions)
{
    return wmtp::AppendRows{{at<void const>(k), dtype(row_dtype)}, {at<void const>(v), dtype(row_dtype)},
        {at<int32_t const>(row_offsets), n_requests, n_rows}, at<int64_t const>(start_positions)};
}

wmtp::RingCache ring_cache(Address k, Address v, int code, int32_t n_lanes, int64_t capacity, int64_t n_sink)
{
    return wmtp::RingCache{{at<void>(k), dtype(code)}, {at<void>(v), dtype(code)}, n_lanes, capacity, n_sink};
}

wmtp::PagedCache paged_cache(
    Address k, Address v, int code, int64_t n_pages, int64_t page_size, Address block_table, int64_t max_pages)
{
    return wmtp::PagedCache{{at<void>(k), dtype(code)}, {at<void>(v), dtype(code)}, n_pages, page_size,
        at<int32_t const>(block_table), max_pages};
}

void bind_attention(nb::module_& m)
{
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.def(
        "ring_append",
        [](Address k, Address v, int row_dtype, Address row_offsets, int32_t n_requests, int64_t n_rows,
            Address start_positions, int32_t n_kv_heads, int32_t head_dim, Address ring_k, Address ring_v,
            int ring_dtype, int32_t n_lanes, int64_t capacity, int64_t n_sink, Address lanes, int n_threads)
        {
            wmtp::ring_append(append_rows(k, v, row_dtype, row_offsets, n_requests, n_rows, start_positions),
                {0, n_kv_heads, head_dim}, ring_cache(ring_k, ring_v, ring_dtype, n_lanes, capacity, n_sink),
                at<int32_t const>(lanes), n_threads);
        },
        Release());
    m.def(
        "windowed_draft_attention",
        [](Address q, int q_dtype, Address query_offsets, int64_t n_queries, int32_t n_query_heads, Address k,
            Address v, int row_dtype, Address row_offsets, int32_t n_requests, int64_t n_rows, Address start_positions,
            int32_t n_kv_heads, int32_t head_dim, Address ring_k, Address ring_v, int ring_dtype, int32_t n_lanes,
            int64_t capacity, int64_t n_sink, Address lanes, int64_t window, float scale, Address mask,
            int32_t mask_words, Address out, int n_threads)
        {
            wmtp::windowed_draft_attention({at<void const>(q), dtype(q_dtype)},
                append_rows(k, v, row_dtype, row_offsets, n_requests, n_rows, start_positions),
                {at<int32_t const>(query_offsets), n_requests, n_queries}, {n_query_heads, n_kv_heads, head_dim},
                ring_cache(ring_k, ring_v, ring_dtype, n_lanes, capacity, n_sink), at<int32_t const>(lanes), window,
                scale, {at<uint32_t const>(mask), mask_words}, {at<void>(out), dtype(q_dtype)}, n_threads);
        },
        Release());
    m.def(
        "paged_append",
        [](Address k, Address v, int row_dtype, Address row_offsets, int32_t n_requests, int64_t n_rows,
            Address start_positions, int32_t n_kv_heads, int32_t head_dim, Address k_pages, Address v_pages,
            int page_dtype, int64_t n_pages, int64_t page_size, Address block_table, int64_t max_pages, int n_threads)
        {
            wmtp::paged_append(append_rows(k, v, row_dtype, row_offsets, n_requests, n_rows, start_positions),
                {0, n_kv_heads, head_dim},
                paged_cache(k_pages, v_pages, page_dtype, n_pages, page_size, block_table, max_pages), n_threads);
        },
        Release());
    m.def(
        "full_attention",
        [](Address q, int q_dtype, Address query_offsets, int32_t n_requests, int64_t n_queries,
            Address query_positions, int32_t n_query_heads, int32_t n_kv_heads, int32_t head_dim, Address k_pages,
            Address v_pages, int page_dtype, int64_t n_pages, int64_t page_size, Address block_table, int64_t max_pages,
            float scale, Address mask, int32_t mask_words, Address tree_starts, Address out, int n_threads)
        {
            wmtp::full_attention({at<void const>(q), dtype(q_dtype)},
                {at<int32_t const>(query_offsets), n_requests, n_queries}, at<int64_t const>(query_positions),
                {n_query_heads, n_kv_heads, head_dim},
                paged_cache(k_pages, v_pages, page_dtype, n_pages, page_size, block_table, max_pages), scale,
                {{at<uint32_t const>(mask), mask_words}, at<int64_t const>(tree_starts)},
                {at<void>(out), dtype(q_dtype)}, n_threads);
        },
        Release());
}

void bind_gated_delta(nb::module_& m)
{
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.def(
        "gated_delta_rows",
        [](Address q, Address k, Address v, Address g, Address beta, Address state, Address slots, int32_t n_requests,
            int32_t n_rows, int32_t n_key_heads, int32_t n_value_heads, int32_t key_dim, int32_t value_dim,
            int64_t n_slots, Address out, Address delta, int n_threads)
        {
            wmtp::gated_delta_rows(at<float const>(q), at<float const>(k), at<float const>(v), at<float const>(g),
                at<float const>(beta), at<float const>(state), at<int32_t const>(slots),
                {n_requests, n_rows, n_key_heads, n_value_heads, key_dim, value_dim, n_slots}, at<float>(out),
                at<float>(delta), n_threads);
        },
        Release());
    m.def(
        "gated_delta_commit",
        [](Address k, Address g, Address delta, Address state, Address slots, Address counts, int32_t n_requests,
            int32_t n_rows, int32_t n_key_heads, int32_t n_value_heads, int32_t key_dim, int32_t value_dim,
            int64_t n_slots, int n_threads)
        {
            wmtp::gated_delta_commit(at<float const>(k), at<float const>(g), at<float const>(delta), at<float>(state),
                at<int32_t const>(slots), at<int32_t const>(counts),
                {n_requests, n_rows, n_key_heads, n_value_heads, key_dim, value_dim, n_slots}, n_threads);
        },
        Release());
}

void bind_host(nb::module_& m)
{
    m.def("available_isas", &wmtp::available_isas);
    m.def("current_isa", &wmtp::current_isa);
    m.def("set_isa", &wmtp::set_isa, nb::arg("name"));
    m.def(
        "advise_huge_pages", [](Address data, size_t bytes) { return wmtp::advise_huge_pages(at<void>(data), bytes); });
    m.def(
        "stream_sum", [](Address data, size_t n, int n_threads)
        { return wmtp::stream_sum(at<float const>(data), n, n_threads); }, nb::call_guard<nb::gil_scoped_release>());
}

} // namespace

NB_MODULE(_core, m)
{
    m.doc() = "CPU kernels and ring arithmetic of tllm_wmtp; use tllm_wmtp.ops and tllm_wmtp.ring.";
    bind_ring(m);
    bind_attention(m);
    bind_gated_delta(m);
    bind_host(m);
}
