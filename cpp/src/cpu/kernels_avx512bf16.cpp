#include "kernels.hpp"

#include <immintrin.h>

#include <type_traits>

namespace wmtp::cpu
{
namespace
{
#include "bf16.inl"
#include "next_rows.inl"
#include "simd_avx512.inl"
// Order matters: each file uses the one before.
#include "block_kernel.inl"
#include "dot_kernel.inl"
#include "gated_delta.inl"
} // namespace

#include "table.inl"
KernelTable const kAvx512Bf16Kernels = WMTP_KERNEL_TABLE("avx512_bf16", true, attend_bf16_dot);

} // namespace wmtp::cpu
