#include "kernels.hpp"

#include <immintrin.h>

namespace wmtp::cpu
{
namespace
{
#include "bf16.inl"
#include "next_rows.inl"
#include "simd_avx2.inl"
// Order matters: each file uses the one before.
#include "block_kernel.inl"
#include "gated_delta.inl"
} // namespace

#include "table.inl"
KernelTable const kAvx2Kernels = WMTP_KERNEL_TABLE("avx2", false, nullptr);

} // namespace wmtp::cpu
