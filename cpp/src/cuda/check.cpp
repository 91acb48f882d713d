#include <string>
#include <type_traits>

#include "numeric.hpp"
#include "wmtp/ancestors.hpp"
#include "wmtp/cuda/launch.hpp"

// Each text names the value, the rule and the remedy. The first rule that is broken speaks.

namespace wmtp::cuda
{
namespace
{

constexpr int64_t kMaxCells = int64_t{1} << 31;
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kMaxGridY = 65535;

std::string text_of(char const* text)
{
    return text;
}

template <class Number>
std::string text_of(Number value)
{
    return std::to_string(value);
}

//! The text of the first broken rule.
class Rules
{
public:
    template <class... Parts>
    Rules& require(bool holds, Parts const&... parts)
    {
        if (!holds && text_.empty())
        {
            text_ = (text_of(parts) + ...);
        }
        return *this;
    }

    //! Stops later rules from computing with values that an earlier one has refused.
    bool holds() const
    {
        return text_.empty();
    }

    std::string text() const
    {
        return text_;
    }

private:
    std::string text_;
};

bool known_type(DType type)
{
    return type == DType::kFloat32 || type == DType::kBFloat16 || type == DType::kFloat16 || type == DType::kFloat8E4M3;
}

void check_attention(Rules& rules, AttentionShape const& shape, bool has_queries)
{
    rules.require(shape.n_kv_heads >= 1 && shape.n_kv_heads <= kMaxGridY, "n_kv_heads ", shape.n_kv_heads,
        ": must lie in [1, ", kMaxGridY, "]; pass the model's KV heads");
    if (rules.holds() && has_queries)
    {
        rules.require(shape.n_query_heads >= 1 && shape.n_query_heads % shape.n_kv_heads == 0, "n_query_heads ",
            shape.n_query_heads, " is no positive multiple of n_kv_heads ", shape.n_kv_heads,
            ": every KV head serves the same number of query heads");
    }
    rules.require(shape.head_dim >= 16 && shape.head_dim <= kMaxHeadDim && shape.head_dim % 16 == 0, "head_dim ",
        shape.head_dim, ": must be a multiple of 16 up to ", kMaxHeadDim, "; pad the heads");
    rules.require(known_type(shape.row_dtype) && shape.row_dtype != DType::kFloat8E4M3, "row dtype code ",
        static_cast<int32_t>(shape.row_dtype), ": must be float32 (0), bfloat16 (1) or float16 (2); convert the rows");
    rules.require(known_type(shape.kv_dtype), "KV dtype code ", static_cast<int32_t>(shape.kv_dtype),
        ": must be float32 (0), bfloat16 (1), float16 (2) or e4m3 (3); allocate the cache in one of them");
}

void check_counts(Rules& rules, int32_t n_requests, int32_t n_rows, int32_t n_queries)
{
    rules.require(n_requests >= 0 && n_requests <= kMaxGridY, "n_requests ", n_requests, ": must lie in [0, ",
        kMaxGridY, "]; split the batch");
    rules.require(n_rows >= 0, "n_rows ", n_rows, " < 0: a count of appended rows; pass row_offsets' last entry");
    rules.require(
        n_queries >= 0, "n_queries ", n_queries, " < 0: a count of query rows; pass query_offsets' last entry");
}

void check_cells(Rules& rules, char const* outer, int64_t n, char const* inner, int64_t size)
{
    rules.require(n >= 1, outer, " ", n, ": must be positive; allocate the cache first");
    rules.require(size >= 1, inner, " ", size, ": must be positive; allocate the cache first");
    if (rules.holds())
    {
        rules.require(n < kMaxCells && size < kMaxCells && n * size < kMaxCells, outer, " ", n, " x ", inner, " ", size,
            " cells: must be fewer than 2^31; split the cache");
    }
}

void check_mask_words(Rules& rules, int32_t mask_words)
{
    rules.require(
        mask_words >= 0, "mask_words ", mask_words, " < 0: words per row of the ancestor mask; pass 0 for chains");
}

void check_mask(Rules& rules, int32_t mask_words, uint32_t const* ancestor_mask)
{
    rules.require((mask_words > 0) == (ancestor_mask != nullptr), "mask_words ", mask_words,
        ancestor_mask == nullptr ? " without ancestor_mask" : " with an ancestor_mask",
        ": pass both for a tree, neither for a chain");
}

struct Pointer
{
    char const* name;
    void const* address;
    uintptr_t alignment;
};

template <size_t n>
void check_pointers(Rules& rules, Pointer const (&pointers)[n])
{
    for (Pointer const& pointer : pointers)
    {
        rules.require(pointer.address != nullptr, pointer.name, " is null: pass a device pointer");
        rules.require(reinterpret_cast<uintptr_t>(pointer.address) % pointer.alignment == 0, pointer.name,
            " is not aligned to ", pointer.alignment, " bytes: pass the start of an allocation");
    }
}

void check_scales(Rules& rules, DType kv_dtype, float k_scale, float v_scale)
{
    bool const positive = k_scale > 0.0F && v_scale > 0.0F && k_scale < 1e30F && v_scale < 1e30F;
    rules.require(positive, "KV scales ", k_scale, ", ", v_scale, ": must be positive and finite; pass max|x| / 448");
    rules.require(kv_dtype == DType::kFloat8E4M3 || (k_scale == 1.0F && v_scale == 1.0F), "KV scales ", k_scale, ", ",
        v_scale, " with a cache that is not e4m3: must be 1; only 8-bit caches are scaled");
}

} // namespace

std::string check(WindowedShape const& shape)
{
    Rules rules;
    check_attention(rules, shape.attention, shape.n_queries > 0);
    check_counts(rules, shape.n_requests, shape.n_rows, shape.n_queries);
    rules.require(shape.n_queries <= shape.n_rows, "n_queries ", shape.n_queries, " > n_rows ", shape.n_rows,
        ": a request answers only rows it appends; append them in the same call");
    rules.require(shape.n_sink >= 0, "n_sink ", shape.n_sink, " < 0: sinks are a count; pass 0 for none");
    check_cells(rules, "n_lanes", shape.n_lanes, "ring capacity", shape.capacity);
    rules.require(shape.capacity > shape.n_sink, "ring capacity ", shape.capacity, " <= n_sink ", shape.n_sink,
        ": allocate n_sink + window + spare slots");
    if (rules.holds() && shape.n_queries > 0)
    {
        rules.require(shape.window >= 1, "window ", shape.window, ": must be >= 1; a query sees at least its own key");
        rules.require(shape.capacity - shape.n_sink >= shape.window, "ring capacity ", shape.capacity, " < n_sink ",
            shape.n_sink, " + window ", shape.window, ": allocate n_sink + window + spare slots");
        check_mask_words(rules, shape.mask_words);
    }
    if (rules.holds() && shape.n_requests == 1 && shape.n_queries > 0)
    {
        // How the rows of several requests are shared out is known on the device only.
        bool const tree = shape.mask_words > 0;
        int32_t const overwriting = tree ? shape.n_rows : shape.n_queries;
        int64_t const spare = shape.capacity - shape.n_sink - shape.window;
        rules.require(overwriting - 1 <= spare, tree ? "n_rows " : "n_queries ", overwriting, " but the ring spares ",
            spare,
            " slots: the newest row would overwrite what the first query sees; allow at most spare + 1, or raise the "
            "capacity");
        rules.require(!tree || static_cast<int64_t>(shape.mask_words) * kAncestorWordBits >= shape.n_rows,
            "mask_words ", shape.mask_words, " for ", shape.n_rows, " appended rows: pass ceil(rows / 32) words");
    }
    return rules.text();
}

std::string check(WindowedShape const& shape, WindowedBuffers const& buffers)
{
    Rules rules;
    if (shape.n_requests > 0 && shape.n_rows > 0)
    {
        check_pointers(rules,
            {{"k", buffers.k, 16}, {"v", buffers.v, 16}, {"ring_k", buffers.ring_k, 16}, {"ring_v", buffers.ring_v, 16},
                {"row_offsets", buffers.row_offsets, 4}, {"start_positions", buffers.start_positions, 8},
                {"lanes", buffers.lanes, 4}});
    }
    if (shape.n_requests > 0 && shape.n_queries > 0)
    {
        check_pointers(
            rules, {{"q", buffers.q, 16}, {"out", buffers.out, 16}, {"query_offsets", buffers.query_offsets, 4}});
        check_mask(rules, shape.mask_words, buffers.ancestor_mask);
    }
    check_scales(rules, shape.attention.kv_dtype, buffers.k_scale, buffers.v_scale);
    return rules.text();
}

std::string check(PagedShape const& shape)
{
    Rules rules;
    check_attention(rules, shape.attention, shape.n_queries > 0);
    check_counts(rules, shape.n_requests, shape.n_rows, shape.n_queries);
    check_cells(rules, "n_pages", shape.n_pages, "page_size", shape.page_size);
    if (shape.n_requests > 0)
    {
        check_cells(rules, "max_pages", shape.max_pages, "page_size", shape.page_size);
    }
    check_mask_words(rules, shape.mask_words);
    return rules.text();
}

std::string check(PagedShape const& shape, PagedBuffers const& buffers)
{
    Rules rules;
    if (shape.n_requests > 0 && shape.n_rows > 0)
    {
        check_pointers(rules,
            {{"k", buffers.k, 16}, {"v", buffers.v, 16}, {"row_offsets", buffers.row_offsets, 4},
                {"start_positions", buffers.start_positions, 8}});
    }
    if (shape.n_requests > 0 && shape.n_queries > 0)
    {
        check_pointers(rules,
            {{"q", buffers.q, 16}, {"out", buffers.out, 16}, {"query_offsets", buffers.query_offsets, 4},
                {"query_positions", buffers.query_positions, 8}});
        check_mask(rules, shape.mask_words, buffers.ancestor_mask);
    }
    if (shape.n_requests > 0 && shape.n_queries > 0 && shape.mask_words > 0)
    {
        check_pointers(rules, {{"tree_starts", buffers.tree_starts, 8}});
    }
    if (shape.n_requests > 0 && (shape.n_rows > 0 || shape.n_queries > 0))
    {
        check_pointers(rules,
            {{"k_pages", buffers.k_pages, 16}, {"v_pages", buffers.v_pages, 16},
                {"block_table", buffers.block_table, 4}});
    }
    check_scales(rules, shape.attention.kv_dtype, buffers.k_scale, buffers.v_scale);
    return rules.text();
}

std::string check(GatedDeltaShape const& shape)
{
    constexpr int32_t kMaxKeyDim = 256;
    Rules rules;
    check_counts(rules, shape.n_requests, shape.n_rows, 0);
    rules.require(shape.n_key_heads >= 1 && shape.n_value_heads >= 1 && shape.n_value_heads % shape.n_key_heads == 0,
        "n_value_heads ", shape.n_value_heads, " is no positive multiple of n_key_heads ", shape.n_key_heads,
        ": every key head serves the same number of value heads");
    rules.require(shape.key_dim >= 1 && shape.key_dim <= kMaxKeyDim, "key_dim ", shape.key_dim, ": must lie in [1, ",
        kMaxKeyDim, "]; a block keeps the state of its columns in shared memory");
    rules.require(shape.value_dim >= 16 && shape.value_dim % 16 == 0, "value_dim ", shape.value_dim,
        ": must be a positive multiple of 16; pad the values");
    rules.require(shape.n_slots >= 1, "n_slots ", shape.n_slots, ": must be positive; allocate the state pool first");
    return rules.text();
}

} // namespace wmtp::cuda
