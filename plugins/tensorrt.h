#pragma once

// The interfaces of TensorRT that the plugin needs: NVIDIA's headers where an SDK is given (CMake defines
// WMTP_TENSORRT_SDK from TENSORRT_ROOT), our own declarations of the same interfaces elsewhere. tests/trt prints the
// layout of either and compares it with one checked-in table, so the two cannot drift apart.

#if WMTP_TENSORRT_SDK
#include <NvInferRuntime.h>
#else
#include "tensorrtDeclarations.h"
#endif
