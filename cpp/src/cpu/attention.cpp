#include "wmtp/attention.hpp"

#include <cstring>
#include <limits>
#include <vector>

#include "append.hpp"
#include "checks.hpp"
#include "kernels.hpp"
#include "key_source.hpp"
#include "scratch.hpp"

// Plan: requests with few rows (decode, verify) are split over key chunks, because their work is reading keys; requests
// with many rows (prefill) are split over rows and KV heads, because their work is arithmetic on keys that stay in
// cache. Either way a row goes through the same blocks and merges in the same order, so a row's result is bit-identical
// for every number of rows, requests and threads.

namespace wmtp
{
namespace cpu
{
namespace
{

constexpr int kSplitKeysRows = 32; //!< requests with more rows than this are split over rows
constexpr int kMaxItemRows = 64;
constexpr int kMaxItemHeadRows = 256; //!< rows times query heads per KV head: what stays in the second-level cache
constexpr int64_t kParallelWork = int64_t{1} << 18; //!< multiply-adds under which one thread does it all

//! One request as the kernels see it.
struct Request
{
    KeySource keys;
    RowRule const* rows;
    int64_t first_row; //!< in q and out
    int64_t n_rows;
    int64_t sink_end; //!< keys lie in [0, sink_end) and [window_begin, window_end)
    int64_t window_begin;
    int64_t window_end;
    int64_t n_chunks;   //!< chunks that hold a visible key
    char* q;            //!< split over keys: [kv head, row, group, head_dim]
    SoftmaxState parts; //!< split over keys: [chunk, kv head, row, group]
};

struct Item
{
    int32_t request;
    int32_t first_head;
    int32_t end_head;
    int64_t chunk;     //!< split over keys: ordinal among the request's chunks
    int64_t first_row; //!< split over rows
    int64_t n_rows;
};

struct Problem
{
    HeadShape heads;
    int group;
    int padded;
    VisibilityRule rule;
    float scale_log2;
    ConstTensor q;
    MutableTensor out;
    void (*attend)(BlockTask const&);
    bool query_is_bf16; //!< what the block kernel reads
    bool cache_is_bf16;
    void const* zeros; //!< one token row

    size_t query_bytes() const
    {
        return query_is_bf16 ? 2 : 4;
    }

    size_t cache_bytes() const
    {
        return cache_is_bf16 ? 2 : 4;
    }
};

SoftmaxState at_row(SoftmaxState state, int64_t row, int padded)
{
    return SoftmaxState{state.max_log2 + row, state.sum + row, state.acc + row * padded};
}

void clear(SoftmaxState state, int64_t n_rows, int padded)
{
    for (int64_t i = 0; i < n_rows; ++i)
    {
        state.max_log2[i] = -std::numeric_limits<float>::infinity();
        state.sum[i] = 0.0F;
    }
    std::memset(state.acc, 0, static_cast<size_t>(n_rows) * padded * sizeof(float));
}

SoftmaxState take_state(Arena& arena, int64_t n_rows, int padded)
{
    auto const n = static_cast<size_t>(n_rows);
    float* const max_log2 = arena.take<float>(n);
    float* const sum = arena.take<float>(n);
    return SoftmaxState{max_log2, sum, arena.take<float>(n * static_cast<size_t>(padded))};
}

//! Number of the i-th chunk that holds a visible key: those of the sinks first.
int64_t chunk_number(Request const& request, int64_t ordinal)
{
    int64_t const sink_chunks = (request.sink_end + kChunkKeys - 1) / kChunkKeys;
    int64_t const first_window_chunk = request.window_begin / kChunkKeys;
    if (ordinal < sink_chunks)
    {
        return ordinal;
    }
    int64_t const first = first_window_chunk > sink_chunks ? first_window_chunk : sink_chunks;
    return first + ordinal - sink_chunks;
}

void plan_chunks(Request& request)
{
    int64_t const sink_chunks = (request.sink_end + kChunkKeys - 1) / kChunkKeys;
    int64_t const first_window_chunk = request.window_begin / kChunkKeys;
    int64_t const end_chunk = (request.window_end + kChunkKeys - 1) / kChunkKeys;
    int64_t const first = first_window_chunk > sink_chunks ? first_window_chunk : sink_chunks;
    request.n_chunks = sink_chunks + (end_chunk > first ? end_chunk - first : 0);
}

//! Query rows of one KV head, [row, group, head_dim], in the compute type.
void gather_queries(Problem const& problem, int64_t first_row, int64_t n_rows, int head, char* out)
{
    int64_t const n = static_cast<int64_t>(problem.group) * problem.heads.head_dim;
    int64_t const row_elements = static_cast<int64_t>(problem.heads.n_query_heads) * problem.heads.head_dim;
    for (int64_t row = 0; row < n_rows; ++row)
    {
        int64_t const at = (first_row + row) * row_elements + head * n;
        if (problem.q.dtype == DType::kFloat32)
        {
            std::memcpy(out + row * n * 4, static_cast<float const*>(problem.q.data) + at, n * sizeof(float));
            continue;
        }
        uint16_t const* const in = static_cast<uint16_t const*>(problem.q.data) + at;
        if (problem.query_is_bf16)
        {
            std::memcpy(out + row * n * 2, in, n * sizeof(uint16_t));
            continue;
        }
        for (int64_t i = 0; i < n; ++i)
        {
            uint32_t const bits = static_cast<uint32_t>(in[i]) << 16;
            std::memcpy(out + (row * n + i) * 4, &bits, sizeof(bits));
        }
    }
}

void finish_rows(Problem const& problem, int64_t first_row, int64_t n_rows, int head, SoftmaxState state)
{
    KernelTable const& table = kernels();
    int64_t const head_dim = problem.heads.head_dim;
    for (int64_t row = 0; row < n_rows; ++row)
    {
        for (int g = 0; g < problem.group; ++g)
        {
            SoftmaxState const finished = at_row(state, row * problem.group + g, problem.padded);
            int64_t const at = ((first_row + row) * problem.heads.n_query_heads + head * problem.group + g) * head_dim;
            if (problem.out.dtype == DType::kFloat32)
            {
                table.finish_row_f32(finished, problem.heads.head_dim, static_cast<float*>(problem.out.data) + at);
            }
            else
            {
                table.finish_row_bf16(finished, problem.heads.head_dim, static_cast<uint16_t*>(problem.out.data) + at);
            }
        }
    }
}

//! One block of keys, ready for every head.
struct Block
{
    void const* k[kBlockKeys];
    void const* v[kBlockKeys];
    uint64_t visible[kMaxItemRows];
    bool everything_visible;
    int n_keys; //!< 0: nobody sees a key of it
};

void prepare(
    Problem const& problem, Request const& request, int64_t first_row, int64_t n_rows, int64_t start, Block& block)
{
    uint64_t any = 0;
    uint64_t all = ~uint64_t{0};
    for (int64_t row = 0; row < n_rows; ++row)
    {
        uint64_t const bits = visible_bits(request.rows[first_row + row], problem.rule, start);
        block.visible[row] = bits;
        any |= bits;
        all &= bits;
    }
    block.everything_visible = all == ~uint64_t{0};
    block.n_keys = 0;
    CellRun run{0, 0};
    for (int key = 0; key < kBlockKeys && any != 0; ++key)
    {
        if ((any >> key & 1U) == 0)
        {
            block.k[key] = problem.zeros;
            block.v[key] = problem.zeros;
            run.count = 0;
            continue;
        }
        if (run.count == 0)
        {
            run = request.keys.run_at(start + key);
        }
        size_t const offset = static_cast<size_t>(run.cell) * request.keys.token_bytes;
        block.k[key] = request.keys.k + offset;
        block.v[key] = request.keys.v + offset;
        ++run.cell;
        --run.count;
        block.n_keys = key + 1;
    }
}

//! Rows [first_row, first_row + n_rows) of a request over one chunk of keys. `q` and `state` point at the first head;
//! `head_rows` is the number of state rows from one head to the next.
void attend_chunk(Problem const& problem, Request const& request, Item const& item, int64_t first_row, int64_t n_rows,
    int64_t chunk, char const* q, SoftmaxState state, int64_t head_rows, char* block_scratch)
{
    int64_t const begin = chunk * kChunkKeys;
    int64_t const end = begin + kChunkKeys < request.window_end ? begin + kChunkKeys : request.window_end;
    size_t const head_bytes = problem.cache_bytes() * problem.heads.head_dim;
    int64_t const n_heads = item.end_head - item.first_head;
    Block blocks[2];
    int current = 0;
    auto const advance = [&](int64_t start, Block& block)
    {
        for (; start < end; start += kBlockKeys)
        {
            // Between the sinks and the window there is nothing to see.
            if (start >= request.sink_end && start + kBlockKeys <= request.window_begin)
            {
                start = request.window_begin / kBlockKeys * kBlockKeys - kBlockKeys;
                continue;
            }
            prepare(problem, request, first_row, n_rows, start, block);
            if (block.n_keys != 0)
            {
                break;
            }
        }
        return start;
    };
    int64_t start = advance(begin, blocks[current]);
    while (start < end)
    {
        Block const& block = blocks[current];
        Block& next = blocks[1 - current];
        int64_t const next_start = advance(start + kBlockKeys, next);
        bool const has_next = next_start < end;
        for (int head = item.first_head; head < item.end_head; ++head)
        {
            int64_t const local = head - item.first_head;
            BlockTask task{};
            task.k_rows = block.k;
            task.v_rows = block.v;
            // Each head asks for its share of the next block's token rows.
            int64_t const first_next = kBlockKeys * local / n_heads;
            task.next_k_rows = next.k + first_next;
            task.next_v_rows = next.v + first_next;
            task.n_next_rows = has_next ? static_cast<int>(kBlockKeys * (local + 1) / n_heads - first_next) : 0;
            task.next_offset_bytes = item.first_head * head_bytes;
            task.next_row_bytes = static_cast<int>(n_heads * head_bytes);
            task.head_offset_bytes = head * head_bytes;
            task.n_keys = block.n_keys;
            task.head_dim = problem.heads.head_dim;
            task.n_rows = static_cast<int>(n_rows) * problem.group;
            task.rows_per_mask = problem.group;
            task.visible = block.everything_visible ? nullptr : block.visible;
            task.q = q + local * head_rows * problem.heads.head_dim * problem.query_bytes();
            task.scale_log2 = problem.scale_log2;
            task.state = at_row(state, local * head_rows, problem.padded);
            task.scratch = block_scratch;
            problem.attend(task);
        }
        start = next_start;
        current = 1 - current;
    }
}

void run_key_split(Problem const& problem, Request const& request, Item const& item)
{
    thread_local Scratch scratch;
    char* const block_scratch = scratch.reserve(block_scratch_bytes(problem.heads.head_dim));
    int64_t const head_rows = request.n_rows * problem.group;
    int64_t const first = (item.chunk * problem.heads.n_kv_heads + item.first_head) * head_rows;
    SoftmaxState const state = at_row(request.parts, first, problem.padded);
    clear(state, (item.end_head - item.first_head) * head_rows, problem.padded);
    char const* const q =
        request.q + static_cast<size_t>(item.first_head) * head_rows * problem.heads.head_dim * problem.query_bytes();
    attend_chunk(problem, request, item, 0, request.n_rows, chunk_number(request, item.chunk), q, state, head_rows,
        block_scratch);
}

//! Merges the chunks of one head of a request that was split over keys, and writes its rows.
void finish_key_split(Problem const& problem, Request const& request, int head)
{
    KernelTable const& table = kernels();
    int64_t const head_rows = request.n_rows * problem.group;
    SoftmaxState const total = at_row(request.parts, head * head_rows, problem.padded);
    for (int64_t chunk = 1; chunk < request.n_chunks; ++chunk)
    {
        SoftmaxState const part =
            at_row(request.parts, (chunk * problem.heads.n_kv_heads + head) * head_rows, problem.padded);
        for (int64_t row = 0; row < head_rows; ++row)
        {
            table.merge_row(at_row(total, row, problem.padded), at_row(part, row, problem.padded), problem.padded);
        }
    }
    finish_rows(problem, request.first_row, request.n_rows, head, total);
}

struct RowSplitScratch
{
    char* q;
    SoftmaxState total;
    SoftmaxState part;
    char* block;

    RowSplitScratch(Arena& arena, Problem const& problem, int64_t head_rows)
        : q(arena.take<char>(static_cast<size_t>(head_rows) * problem.heads.head_dim * problem.query_bytes()))
        , total(take_state(arena, head_rows, problem.padded))
        , part(take_state(arena, head_rows, problem.padded))
        , block(arena.take<char>(block_scratch_bytes(problem.heads.head_dim)))
    {
    }
};

void run_row_split(Problem const& problem, Request const& request, Item const& item)
{
    thread_local Scratch scratch;
    KernelTable const& table = kernels();
    int64_t const head_rows = item.n_rows * problem.group;
    Arena counting;
    RowSplitScratch const counted(counting, problem, head_rows);
    static_cast<void>(counted);
    Arena placing(scratch.reserve(counting.used()));
    RowSplitScratch const held(placing, problem, head_rows);
    gather_queries(problem, request.first_row + item.first_row, item.n_rows, item.first_head, held.q);
    clear(held.total, head_rows, problem.padded);
    int64_t last_query = 0;
    for (int64_t row = item.first_row; row < item.first_row + item.n_rows; ++row)
    {
        int64_t const query = request.rows[row].query;
        last_query = query > last_query ? query : last_query;
    }
    for (int64_t ordinal = 0; ordinal < request.n_chunks; ++ordinal)
    {
        int64_t const chunk = chunk_number(request, ordinal);
        if (request.rows[item.first_row].ancestors == nullptr && chunk * kChunkKeys > last_query)
        {
            break;
        }
        clear(held.part, head_rows, problem.padded);
        attend_chunk(
            problem, request, item, item.first_row, item.n_rows, chunk, held.q, held.part, head_rows, held.block);
        for (int64_t row = 0; row < head_rows; ++row)
        {
            table.merge_row(
                at_row(held.total, row, problem.padded), at_row(held.part, row, problem.padded), problem.padded);
        }
    }
    finish_rows(problem, request.first_row + item.first_row, item.n_rows, item.first_head, held.total);
}

//! Host-side plan of one call. The vectors keep their storage between calls.
struct Plan
{
    std::vector<Request> requests;
    std::vector<RowRule> rows;
    std::vector<Item> items;
    std::vector<char> zeros;
    Scratch scratch;
};

Plan& thread_plan()
{
    thread_local Plan plan;
    return plan;
}

void add_row_split_items(Problem const& problem, Request const& request, int32_t b, std::vector<Item>& items)
{
    int64_t rows_per_item = kMaxItemHeadRows / problem.group;
    rows_per_item = rows_per_item > kMaxItemRows ? kMaxItemRows : rows_per_item < 1 ? 1 : rows_per_item;
    // Later rows see more keys; starting with them leaves the short items to even out the threads.
    for (int64_t last = request.n_rows; last > 0; last -= rows_per_item)
    {
        int64_t const first = last > rows_per_item ? last - rows_per_item : 0;
        for (int32_t head = 0; head < problem.heads.n_kv_heads; ++head)
        {
            items.push_back(Item{b, head, head + 1, 0, first, last - first});
        }
    }
}

//! Runs the requests of the plan.
void run(Problem problem, Plan& plan, int n_threads)
{
    KernelTable const& table = kernels();
    problem.group = problem.heads.n_query_heads / problem.heads.n_kv_heads;
    problem.padded = padded_dim(problem.heads.head_dim);
    problem.query_is_bf16 = problem.cache_is_bf16 && problem.q.dtype == DType::kBFloat16 && table.bf16_dot;
    problem.attend = !problem.cache_is_bf16 ? table.attend_f32
        : problem.query_is_bf16             ? table.attend_bf16_dot
                                            : table.attend_bf16;
    int32_t const n_kv_heads = problem.heads.n_kv_heads;
    plan.zeros.assign(static_cast<size_t>(n_kv_heads) * problem.heads.head_dim * problem.cache_bytes(), 0);
    problem.zeros = plan.zeros.data();

    int64_t total_chunks = 0;
    int64_t work = 0;
    for (Request& request : plan.requests)
    {
        plan_chunks(request);
        total_chunks += request.n_rows <= kSplitKeysRows ? request.n_chunks : 0;
        int64_t const n_keys = request.sink_end + request.window_end - request.window_begin;
        work += request.n_rows * n_keys * problem.heads.n_query_heads * problem.heads.head_dim;
    }
    // Heads together stream the cache in order; apart they give small problems enough items.
    int32_t const heads_per_item = total_chunks >= 4 * n_threads ? n_kv_heads : 1;
    plan.items.clear();
    auto const place = [&](Arena& arena)
    {
        for (Request& request : plan.requests)
        {
            if (request.n_rows > kSplitKeysRows)
            {
                continue;
            }
            int64_t const rows = request.n_rows * problem.heads.n_query_heads;
            request.q = arena.take<char>(static_cast<size_t>(rows) * problem.heads.head_dim * problem.query_bytes());
            request.parts = take_state(arena, rows * request.n_chunks, problem.padded);
        }
    };
    Arena counting;
    place(counting);
    Arena placing(plan.scratch.reserve(counting.used()));
    place(placing);
    for (size_t b = 0; b < plan.requests.size(); ++b)
    {
        Request const& request = plan.requests[b];
        auto const index = static_cast<int32_t>(b);
        if (request.n_rows > kSplitKeysRows)
        {
            add_row_split_items(problem, request, index, plan.items);
            continue;
        }
        if (request.n_rows == 0)
        {
            continue;
        }
        for (int32_t head = 0; head < n_kv_heads; ++head)
        {
            size_t const at = static_cast<size_t>(head) * request.n_rows * problem.group * problem.heads.head_dim;
            gather_queries(problem, request.first_row, request.n_rows, head, request.q + at * problem.query_bytes());
        }
        for (int64_t chunk = 0; chunk < request.n_chunks; ++chunk)
        {
            for (int32_t head = 0; head < n_kv_heads; head += heads_per_item)
            {
                plan.items.push_back(Item{index, head, head + heads_per_item, chunk, 0, 0});
            }
        }
    }

    auto const n_items = static_cast<int64_t>(plan.items.size());
    auto const n_finishes = static_cast<int64_t>(plan.requests.size()) * n_kv_heads;
    bool const parallel = n_items > 1 && work >= kParallelWork;
#pragma omp parallel num_threads(n_threads) if (parallel)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_items; ++i)
        {
            Item const& item = plan.items[static_cast<size_t>(i)];
            Request const& request = plan.requests[static_cast<size_t>(item.request)];
            if (request.n_rows > kSplitKeysRows)
            {
                run_row_split(problem, request, item);
            }
            else
            {
                run_key_split(problem, request, item);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n_finishes; ++i)
        {
            Request const& request = plan.requests[static_cast<size_t>(i / n_kv_heads)];
            if (request.n_rows > 0 && request.n_rows <= kSplitKeysRows)
            {
                finish_key_split(problem, request, static_cast<int>(i % n_kv_heads));
            }
        }
    }
}

//! Range of positions that the rows of a request see, for a request with at least one row.
void set_visible_range(Request& request, VisibilityRule rule)
{
    request.sink_end = 0;
    request.window_begin = std::numeric_limits<int64_t>::max();
    request.window_end = 0;
    for (int64_t row = 0; row < request.n_rows; ++row)
    {
        RowRule const& r = request.rows[row];
        VisibleRanges const ranges = visible_ranges(rule.n_sink, rule.window, r.query);
        // Ancestors older than the window are seen too.
        bool const tree = r.ancestors != nullptr;
        int64_t const end = tree ? r.appended.end : ranges.window.end;
        int64_t const begin = tree && r.appended.begin < ranges.window.begin ? r.appended.begin : ranges.window.begin;
        request.sink_end = ranges.sink.end > request.sink_end ? ranges.sink.end : request.sink_end;
        request.window_begin = begin < request.window_begin ? begin : request.window_begin;
        request.window_end = end > request.window_end ? end : request.window_end;
    }
}

void start_plan(Plan& plan, RaggedRows queries)
{
    plan.requests.assign(static_cast<size_t>(queries.n_requests), Request{});
    plan.rows.resize(static_cast<size_t>(queries.n_rows));
    for (int32_t b = 0; b < queries.n_requests; ++b)
    {
        Request& request = plan.requests[static_cast<size_t>(b)];
        request.first_row = queries.offsets[b];
        request.n_rows = queries.offsets[b + 1] - queries.offsets[b];
        request.rows = plan.rows.data() + request.first_row;
    }
}

size_t token_bytes(HeadShape heads, DType dtype)
{
    return static_cast<size_t>(heads.n_kv_heads) * heads.head_dim * (dtype == DType::kFloat32 ? 4 : 2);
}

constexpr float kLog2E = 1.44269504088896340736F;

void require_ancestors(int64_t count, int64_t query_row)
{
    require(count >= 1, "ancestor_mask row ", query_row, " is empty: a tree row is its own ancestor; set its bit");
}

//! Rules of the rows of one request whose tree starts at position `start` of its pages.
void set_tree_rules(Request const& request, AncestorMask mask, int64_t start, RowRule* rows)
{
    int64_t n_appended = 0;
    for (int64_t i = 0; i < request.n_rows; ++i)
    {
        int64_t const at = request.first_row + i;
        uint32_t const* const words = mask.words + at * mask.words_per_row;
        int64_t const end = ancestors_end(words, mask.words_per_row);
        require_ancestors(end, at);
        rows[at] = RowRule{start + end - 1, PositionRange{0, 0}, words};
        n_appended = end > n_appended ? end : n_appended;
    }
    for (int64_t i = 0; i < request.n_rows; ++i)
    {
        rows[request.first_row + i].appended = PositionRange{start, start + n_appended};
    }
}

void check_draft(AppendRows const& append, RaggedRows queries, RingCache const& ring, int64_t window, AncestorMask mask)
{
    int64_t const spare = ring.capacity - ring.n_sink - window;
    require(window >= 1, "window ", window, ": must be >= 1; a query sees at least its own key");
    require(spare >= 0, "ring capacity ", ring.capacity, " < n_sink ", ring.n_sink, " + window ", window,
        ": allocate n_sink + window + spare slots");
    for (int32_t b = 0; b < queries.n_requests; ++b)
    {
        int64_t const n_rows = append.rows.offsets[b + 1] - append.rows.offsets[b];
        int64_t const n_queries = queries.offsets[b + 1] - queries.offsets[b];
        require(n_queries <= n_rows, "request ", b, " asks for ", n_queries, " queries but appends ", n_rows,
            " rows: queries are the last appended rows; append them in the same call");
        bool const tree = mask.words != nullptr && n_queries > 0;
        int64_t const overwritten = tree ? n_rows - 1 : n_queries - 1;
        bool const keeps = append_keeps_window(RingMap{ring.n_sink, ring.capacity}, window, 0, overwritten);
        require(keeps, "request ", b, " has ", overwritten + 1, tree ? " tree rows" : " queries",
            " but the ring spares ", spare,
            " slots: the newest row would overwrite what the first query sees; "
            "allow at most spare + 1, or raise the capacity");
        require(!tree || static_cast<int64_t>(mask.words_per_row) * 32 >= n_rows, "ancestor_mask has ",
            mask.words_per_row, " words for ", n_rows, " appended rows: pass ceil(rows / 32) words");
    }
}

} // namespace
} // namespace cpu

void windowed_draft_attention(ConstTensor q, AppendRows const& append, RaggedRows queries, HeadShape heads,
    RingCache const& ring, int32_t const* lanes, int64_t window, float scale, AncestorMask mask, MutableTensor out,
    int n_threads)
{
    using namespace cpu;
    check_append(append, heads);
    check_ring(ring, lanes, append.rows.n_requests);
    check_ragged("query_offsets", queries);
    check_scale(scale);
    check_draft(append, queries, ring, window, mask);

    Plan& plan = thread_plan();
    start_plan(plan, queries);
    Problem problem{};
    problem.heads = heads;
    problem.rule = VisibilityRule{ring.n_sink, window};
    problem.scale_log2 = scale * kLog2E;
    problem.q = q;
    problem.out = out;
    problem.cache_is_bf16 = ring.k.dtype == DType::kBFloat16;
    for (int32_t b = 0; b < queries.n_requests; ++b)
    {
        Request& request = plan.requests[static_cast<size_t>(b)];
        int64_t const start = append.start_positions[b];
        int64_t const n_appended = append.rows.offsets[b + 1] - append.rows.offsets[b];
        for (int64_t i = 0; i < request.n_rows; ++i)
        {
            RowRule& row = plan.rows[static_cast<size_t>(request.first_row + i)];
            row = RowRule{start + n_appended - request.n_rows + i, PositionRange{0, 0}, nullptr};
            if (mask.words != nullptr)
            {
                row.ancestors = mask.words + (request.first_row + i) * mask.words_per_row;
                row.appended = PositionRange{start, start + n_appended};
                int32_t const depth = count_ancestors(row.ancestors, n_appended);
                require_ancestors(depth, request.first_row + i);
                row.query = start + depth - 1;
            }
        }
        request.keys = KeySource{static_cast<char const*>(ring.k.data), static_cast<char const*>(ring.v.data),
            token_bytes(heads, ring.k.dtype), RingMap{ring.n_sink, ring.capacity}, lanes[b] * ring.capacity, nullptr,
            0};
        set_visible_range(request, problem.rule);
    }
    store_ring_rows(append, heads, ring, lanes);
    run(problem, plan, n_threads);
}

void full_attention(ConstTensor q, RaggedRows queries, int64_t const* query_positions, HeadShape heads,
    PagedCache const& pages, float scale, TreeRows tree, MutableTensor out, int n_threads)
{
    using namespace cpu;
    bool const is_tree = tree.mask.words != nullptr;
    check_heads(heads);
    check_ragged("query_offsets", queries);
    if (is_tree)
    {
        check_positions("tree_starts", tree.starts, queries.n_requests);
    }
    else
    {
        check_positions("query_positions", query_positions, queries.n_rows);
    }
    check_scale(scale);
    require(pages.page_size >= 1, "page_size ", pages.page_size, ": must be positive; pass [pages, page_size, Hkv, D]");

    Plan& plan = thread_plan();
    start_plan(plan, queries);
    Problem problem{};
    problem.heads = heads;
    problem.rule = VisibilityRule{0, std::numeric_limits<int64_t>::max() / 2};
    problem.scale_log2 = scale * kLog2E;
    problem.q = q;
    problem.out = out;
    problem.cache_is_bf16 = pages.k.dtype == DType::kBFloat16;
    for (int32_t b = 0; b < queries.n_requests; ++b)
    {
        Request& request = plan.requests[static_cast<size_t>(b)];
        if (is_tree)
        {
            set_tree_rules(request, tree.mask, tree.starts[b], plan.rows.data());
        }
        for (int64_t i = 0; i < request.n_rows && !is_tree; ++i)
        {
            int64_t const at = request.first_row + i;
            plan.rows[static_cast<size_t>(at)] = RowRule{query_positions[at], PositionRange{0, 0}, nullptr};
        }
        request.keys = KeySource{static_cast<char const*>(pages.k.data), static_cast<char const*>(pages.v.data),
            token_bytes(heads, pages.k.dtype), RingMap{0, 1}, 0, pages.block_table + b * pages.max_pages,
            pages.page_size};
        set_visible_range(request, problem.rule);
        check_pages(pages, b, 0, request.window_end);
    }
    run(problem, plan, n_threads);
}

} // namespace wmtp
