#include "workspace.h"

#include <algorithm>

namespace wmtp::plugin
{

namespace
{

//! At least the multiprocessors of any chip the kernels are compiled for (188 on the largest sm_120).
constexpr int32_t kMOST_SMS{192};

} // namespace

int64_t workspaceFor(cuda::WindowedShape const& largest)
{
    // Fewer queries are split more finely, so the largest batch need not be the one with the largest workspace.
    int64_t bytes{};
    for (int64_t requests = 1; requests < 2 * int64_t{largest.n_requests}; requests *= 2)
    {
        for (int64_t queries = 1; queries < 2 * int64_t{largest.n_queries}; queries *= 2)
        {
            cuda::WindowedShape smaller = largest;
            smaller.n_requests = static_cast<int32_t>(std::min<int64_t>(requests, largest.n_requests));
            smaller.n_queries = static_cast<int32_t>(std::min<int64_t>(queries, largest.n_queries));
            bytes = std::max(bytes, cuda::plan(smaller, kMOST_SMS).workspace_bytes);
        }
    }
    return bytes;
}

cuda::Plan planWithin(cuda::WindowedShape const& shape, int32_t nSms, int64_t reservedBytes)
{
    for (int32_t sms = nSms; sms > 0; sms /= 2)
    {
        cuda::Plan const plan = cuda::plan(shape, sms);
        if (plan.workspace_bytes <= reservedBytes)
        {
            return plan;
        }
    }
    return cuda::Plan{1, 0};
}

} // namespace wmtp::plugin
