#pragma once

// WMTP_HD marks a function that compiles for host and device alike. On the host it is always inlined: these headers
// are included by translation units built for different instruction sets, and an out-of-line copy compiled for
// AVX-512 must never become the one the linker keeps for everybody.
#if defined(__CUDACC__)
#define WMTP_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__) || defined(__clang__)
#define WMTP_HD inline __attribute__((always_inline))
#else
#define WMTP_HD inline
#endif
