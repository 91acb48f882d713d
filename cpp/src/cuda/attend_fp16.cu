#include "attend_instance.hpp"

namespace wmtp::cuda
{

cudaError_t attend_fp16(AttendGrid grid, AttentionArgs const& args, cudaStream_t stream)
{
    return attend_tensor_core<DType::kFloat16, false>(grid, args, stream);
}

} // namespace wmtp::cuda
