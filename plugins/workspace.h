#pragma once

// Scratch memory: what the builder reserves, and a plan at run time that fits into it.

#include <cstdint>

#include "wmtp/cuda/launch.hpp"

namespace wmtp::plugin
{

//! Bytes that serve every shape up to `largest`. Needs no device: engines are also built on machines without one, for
//! a chip that is not known here.
int64_t workspaceFor(cuda::WindowedShape const& largest);

//! The launcher's plan for `shape` on `nSms` multiprocessors within `reservedBytes`; with fewer splits where the plan
//! for the whole chip needs more.
cuda::Plan planWithin(cuda::WindowedShape const& shape, int32_t nSms, int64_t reservedBytes);

} // namespace wmtp::plugin
