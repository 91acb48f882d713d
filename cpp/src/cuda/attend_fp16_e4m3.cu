#include "attend_instance.hpp"

namespace wmtp::cuda
{

cudaError_t attend_fp16_e4m3(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream)
{
    return attend_tensor_core<DType::kFloat16, true>(grid, args, stream);
}

} // namespace wmtp::cuda
