#include "wmtp/cuda/launch.hpp"

namespace wmtp::cuda
{

cudaError_t sm_count(int32_t* n_sms)
{
    int device = 0;
    cudaError_t const status = cudaGetDevice(&device);
    if (status != cudaSuccess)
    {
        return status;
    }
    return cudaDeviceGetAttribute(n_sms, cudaDevAttrMultiProcessorCount, device);
}

} // namespace wmtp::cuda
