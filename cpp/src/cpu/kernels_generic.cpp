#include "kernels.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace wmtp::cpu
{
namespace
{
#include "bf16.inl"
#include "next_rows.inl"
#include "simd_generic.inl"
// Order matters: each file uses the one before.
#include "block_kernel.inl"
#include "gated_delta.inl"
} // namespace

#include "table.inl"
KernelTable const kGenericKernels = WMTP_KERNEL_TABLE("scalar", false, nullptr);

} // namespace wmtp::cpu
