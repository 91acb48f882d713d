#include "wmtp/gated_delta.hpp"

#include <cmath>

#include "checks.hpp"
#include "kernels.hpp"
#include "scratch.hpp"

namespace wmtp
{
namespace cpu
{
namespace
{

//! Under this many multiply-adds a second thread costs more than it brings.
constexpr int64_t kParallelWork = int64_t{1} << 17;

void check_shape(GatedDeltaShape shape, int32_t const* slots)
{
    require(shape.n_key_heads >= 1 && shape.n_value_heads % shape.n_key_heads == 0, "n_value_heads ",
        shape.n_value_heads, " is no multiple of n_key_heads ", shape.n_key_heads,
        ": every key head serves the same number of value heads");
    require(shape.value_dim >= 16 && shape.value_dim % 16 == 0, "value_dim ", shape.value_dim,
        ": must be a positive multiple of 16; pad the values");
    require(shape.key_dim >= 1, "key_dim ", shape.key_dim, ": must be positive; pass [.., Dk] keys");
    for (int32_t b = 0; b < shape.n_requests; ++b)
    {
        require(slots[b] >= 0 && slots[b] < shape.n_slots, "slots[", b, "] is ", slots[b], ": must lie in [0, ",
            shape.n_slots, "); pass the slot that the state pool handed out");
        for (int32_t other = 0; other < b; ++other)
        {
            require(slots[other] != slots[b], "slots[", other, "] and slots[", b, "] are both ", slots[b],
                ": a state belongs to one request; give each request its own slot");
        }
    }
}

//! Rows of one head, `stride` apart, scaled to unit length times `factor`.
void normalise_rows(float const* in, int64_t stride, int n_rows, int dim, float factor, float* out)
{
    for (int t = 0; t < n_rows; ++t)
    {
        float const* const row = in + t * stride;
        float squares = 0.0F;
        for (int d = 0; d < dim; ++d)
        {
            squares += row[d] * row[d];
        }
        float const scale = factor / std::sqrt(squares + 1e-6F);
        for (int d = 0; d < dim; ++d)
        {
            out[t * dim + d] = row[d] * scale;
        }
    }
}

//! What one (request, value head) pair needs besides its tensors.
struct HeadScratch
{
    float* q;
    float* k;
    float* decay;
    float* beta;
    float* slice;

    HeadScratch(Arena& arena, GatedDeltaShape shape)
        : q(arena.take<float>(static_cast<size_t>(shape.n_rows) * shape.key_dim))
        , k(arena.take<float>(static_cast<size_t>(shape.n_rows) * shape.key_dim))
        , decay(arena.take<float>(shape.n_rows))
        , beta(arena.take<float>(shape.n_rows))
        , slice(arena.take<float>(static_cast<size_t>(shape.key_dim) * kDeltaSlice))
    {
    }
};

HeadScratch thread_scratch(GatedDeltaShape shape)
{
    thread_local Scratch scratch;
    Arena counting;
    HeadScratch const counted(counting, shape);
    static_cast<void>(counted);
    Arena placing(scratch.reserve(counting.used()));
    return HeadScratch(placing, shape);
}

} // namespace
} // namespace cpu

void gated_delta_rows(float const* q, float const* k, float const* v, float const* g, float const* beta,
    float const* state, int32_t const* slots, GatedDeltaShape shape, float* out, float* delta, int n_threads)
{
    using namespace cpu;
    check_shape(shape, slots);
    KernelTable const& table = kernels();
    int const group = shape.n_value_heads / shape.n_key_heads;
    int const n_items = shape.n_requests * shape.n_value_heads;
    int64_t const state_size = static_cast<int64_t>(shape.key_dim) * shape.value_dim;
    float const query_factor = 1.0F / std::sqrt(static_cast<float>(shape.key_dim));
    bool const parallel = n_items * state_size * shape.n_rows >= kParallelWork;
#pragma omp parallel for num_threads(n_threads) if (parallel) schedule(static)
    for (int item = 0; item < n_items; ++item)
    {
        int64_t const b = item / shape.n_value_heads;
        int64_t const h = item % shape.n_value_heads;
        HeadScratch const held = thread_scratch(shape);
        int64_t const key_stride = static_cast<int64_t>(shape.n_key_heads) * shape.key_dim;
        int64_t const key_at = b * shape.n_rows * key_stride + h / group * shape.key_dim;
        normalise_rows(q + key_at, key_stride, shape.n_rows, shape.key_dim, query_factor, held.q);
        normalise_rows(k + key_at, key_stride, shape.n_rows, shape.key_dim, 1.0F, held.k);
        for (int t = 0; t < shape.n_rows; ++t)
        {
            int64_t const at = (b * shape.n_rows + t) * shape.n_value_heads + h;
            held.decay[t] = std::exp(g[at]);
            held.beta[t] = beta[at];
        }
        int64_t const value_stride = static_cast<int64_t>(shape.n_value_heads) * shape.value_dim;
        int64_t const value_at = b * shape.n_rows * value_stride + h * shape.value_dim;
        table.gated_delta_rows(GatedDeltaHead{held.q, held.k, v + value_at, held.decay, held.beta, value_stride,
            state + (slots[b] * shape.n_value_heads + h) * state_size, nullptr, out + value_at, delta + value_at,
            shape.n_rows, shape.key_dim, shape.value_dim, held.slice});
    }
}

void gated_delta_commit(float const* k, float const* g, float const* delta, float* state, int32_t const* slots,
    int32_t const* counts, GatedDeltaShape shape, int n_threads)
{
    using namespace cpu;
    check_shape(shape, slots);
    for (int32_t b = 0; b < shape.n_requests; ++b)
    {
        require(counts[b] >= 0 && counts[b] <= shape.n_rows, "counts[", b, "] is ", counts[b], ": must lie in [0, ",
            shape.n_rows, "]; only rows that were computed can be committed");
    }
    KernelTable const& table = kernels();
    int const group = shape.n_value_heads / shape.n_key_heads;
    int const n_items = shape.n_requests * shape.n_value_heads;
    int64_t const state_size = static_cast<int64_t>(shape.key_dim) * shape.value_dim;
    bool const parallel = n_items * state_size * shape.n_rows >= kParallelWork;
#pragma omp parallel for num_threads(n_threads) if (parallel) schedule(static)
    for (int item = 0; item < n_items; ++item)
    {
        int64_t const b = item / shape.n_value_heads;
        int64_t const h = item % shape.n_value_heads;
        int const count = counts[b];
        HeadScratch const held = thread_scratch(shape);
        int64_t const key_stride = static_cast<int64_t>(shape.n_key_heads) * shape.key_dim;
        normalise_rows(k + b * shape.n_rows * key_stride + h / group * shape.key_dim, key_stride, count, shape.key_dim,
            1.0F, held.k);
        for (int t = 0; t < count; ++t)
        {
            held.decay[t] = std::exp(g[(b * shape.n_rows + t) * shape.n_value_heads + h]);
        }
        int64_t const value_stride = static_cast<int64_t>(shape.n_value_heads) * shape.value_dim;
        int64_t const value_at = b * shape.n_rows * value_stride + h * shape.value_dim;
        // The kernel only reads `delta` when it commits.
        table.gated_delta_commit(GatedDeltaHead{nullptr, held.k, nullptr, held.decay, nullptr, value_stride, nullptr,
            state + (slots[b] * shape.n_value_heads + h) * state_size, nullptr, const_cast<float*>(delta) + value_at,
            count, shape.key_dim, shape.value_dim, held.slice});
    }
}

} // namespace wmtp
