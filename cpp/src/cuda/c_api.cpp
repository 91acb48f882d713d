// The launchers with C linkage, for callers that load the library at run time. Structs are those of launch.hpp; a
// caller compares wmtp_cuda_struct_size with its own declarations. An error text goes into the caller's buffer; the
// functions that give one return its length, 0 when there is nothing to say.

#include <cstdint>
#include <cstring>
#include <string>

#include "wmtp/cuda/launch.hpp"

#define WMTP_EXPORT extern "C" __attribute__((visibility("default")))

namespace
{

int32_t give(std::string const& text, char* buffer, int32_t capacity)
{
    if (capacity > 0)
    {
        size_t const n = text.size() < static_cast<size_t>(capacity) - 1 ? text.size() : capacity - 1U;
        std::memcpy(buffer, text.data(), n);
        buffer[n] = '\0';
    }
    return static_cast<int32_t>(text.size());
}

template <class Shape, class Buffers>
std::string check_all(Shape const& shape, Buffers const* buffers)
{
    std::string const text = check(shape);
    return text.empty() && buffers != nullptr ? check(shape, *buffers) : text;
}

} // namespace

using namespace wmtp::cuda; // NOLINT: every name below is theirs

//! 1: real kernels. The library that runs them on the host says 2.
WMTP_EXPORT int32_t wmtp_cuda_kind()
{
#if defined(WMTP_EMULATED)
    return 2;
#else
    return 1;
#endif
}

WMTP_EXPORT int32_t wmtp_cuda_struct_size(char const* name)
{
    std::string const text = name;
    if (text == "AttentionShape")
    {
        return sizeof(AttentionShape);
    }
    if (text == "WindowedShape")
    {
        return sizeof(WindowedShape);
    }
    if (text == "WindowedBuffers")
    {
        return sizeof(WindowedBuffers);
    }
    if (text == "PagedShape")
    {
        return sizeof(PagedShape);
    }
    if (text == "PagedBuffers")
    {
        return sizeof(PagedBuffers);
    }
    if (text == "GatedDeltaShape")
    {
        return sizeof(wmtp::GatedDeltaShape);
    }
    return text == "Plan" ? static_cast<int32_t>(sizeof(Plan)) : 0;
}

//! `buffers` may be null: then only the shape is checked.
WMTP_EXPORT int32_t wmtp_cuda_check_windowed(
    WindowedShape const* shape, WindowedBuffers const* buffers, char* text, int32_t capacity)
{
    return give(check_all(*shape, buffers), text, capacity);
}

WMTP_EXPORT int32_t wmtp_cuda_check_paged(
    PagedShape const* shape, PagedBuffers const* buffers, char* text, int32_t capacity)
{
    return give(check_all(*shape, buffers), text, capacity);
}

WMTP_EXPORT int32_t wmtp_cuda_check_gated_delta(wmtp::GatedDeltaShape const* shape, char* text, int32_t capacity)
{
    return give(check(*shape), text, capacity);
}

WMTP_EXPORT void wmtp_cuda_plan_windowed(WindowedShape const* shape, int32_t n_sms, Plan* out)
{
    *out = plan(*shape, n_sms);
}

WMTP_EXPORT void wmtp_cuda_plan_paged(PagedShape const* shape, int32_t n_sms, Plan* out)
{
    *out = plan(*shape, n_sms);
}

WMTP_EXPORT int32_t wmtp_cuda_run_windowed(
    WindowedShape const* shape, Plan const* plan, WindowedBuffers const* buffers, cudaStream_t stream)
{
    return run(*shape, *plan, *buffers, stream);
}

WMTP_EXPORT int32_t wmtp_cuda_run_ring_append(
    WindowedShape const* shape, WindowedBuffers const* buffers, cudaStream_t stream)
{
    return run_ring_append(*shape, *buffers, stream);
}

WMTP_EXPORT int32_t wmtp_cuda_run_paged_append(
    PagedShape const* shape, PagedBuffers const* buffers, cudaStream_t stream)
{
    return run_paged_append(*shape, *buffers, stream);
}

WMTP_EXPORT int32_t wmtp_cuda_run_full_attention(
    PagedShape const* shape, Plan const* plan, PagedBuffers const* buffers, cudaStream_t stream)
{
    return run_full_attention(*shape, *plan, *buffers, stream);
}

WMTP_EXPORT int32_t wmtp_cuda_run_gated_delta_rows(float const* q, float const* k, float const* v, float const* g,
    float const* beta, float const* state, int32_t const* slots, wmtp::GatedDeltaShape const* shape, float* out,
    float* delta, cudaStream_t stream)
{
    return run_gated_delta_rows(q, k, v, g, beta, state, slots, *shape, out, delta, stream);
}

WMTP_EXPORT int32_t wmtp_cuda_run_gated_delta_commit(float const* k, float const* g, float const* delta, float* state,
    int32_t const* slots, int32_t const* counts, wmtp::GatedDeltaShape const* shape, cudaStream_t stream)
{
    return run_gated_delta_commit(k, g, delta, state, slots, counts, *shape, stream);
}

WMTP_EXPORT int32_t wmtp_cuda_sm_count(int32_t* n_sms)
{
    return sm_count(n_sms);
}

WMTP_EXPORT char const* wmtp_cuda_error_text(int32_t code)
{
#if defined(WMTP_EMULATED)
    return code == 0 ? "no error" : "error of the emulated device";
#else
    return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}
