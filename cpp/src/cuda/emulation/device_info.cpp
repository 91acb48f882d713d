#include "emulator.hpp"
#include "wmtp/cuda/launch.hpp"

namespace wmtp::cuda
{

cudaError_t sm_count(int32_t* n_sms)
{
    *n_sms = 8; // few enough for a test to run, and more than one split
    return cudaSuccess;
}

} // namespace wmtp::cuda

extern "C" __attribute__((visibility("default"))) void wmtp_cuda_emulation_seed(uint64_t seed)
{
    wmtp::cuda::emulation::set_seed(seed);
}
