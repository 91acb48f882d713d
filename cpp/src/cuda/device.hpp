#pragma once

// What the kernels ask of the device, in one place: thread indices, barriers, shuffles, wide loads, conversions and the
// tensor core step. Compiled by nvcc these are instructions; compiled by a host compiler they run on the emulator in
// emulation/, which executes a launch block by block and thread by thread. A kernel is a struct:
//
//   struct Kernel { using Args; struct Shared; static constexpr int kThreads, kMinBlocks;
//                   static WMTP_DEVICE void body(Args const&, Shared&); };

#include <cstdint>

#include "numeric.hpp"

#if defined(__CUDACC__)
#define WMTP_DEVICE __device__ __forceinline__
#define WMTP_UNROLL _Pragma("unroll")
#define WMTP_UNROLL_4 _Pragma("unroll 4")
#else
#define WMTP_DEVICE inline
#define WMTP_UNROLL
#define WMTP_UNROLL_4
#include <cmath>

#include "emulation/emulator.hpp"
#endif

namespace wmtp::cuda
{

struct alignas(16) Words4
{
    uint32_t w[4];
};

struct alignas(8) Words2
{
    uint32_t w[2];
};

struct alignas(16) Floats4
{
    float f[4];
};

struct Grid
{
    int64_t x;
    int64_t y;
    int64_t z;
};

#if defined(__CUDACC__)

WMTP_DEVICE int32_t thread_index()
{
    return static_cast<int32_t>(threadIdx.x);
}

WMTP_DEVICE int32_t block_x()
{
    return static_cast<int32_t>(blockIdx.x);
}

WMTP_DEVICE int32_t block_y()
{
    return static_cast<int32_t>(blockIdx.y);
}

WMTP_DEVICE int32_t block_z()
{
    return static_cast<int32_t>(blockIdx.z);
}

WMTP_DEVICE void sync_block()
{
    __syncthreads();
}

WMTP_DEVICE float shuffle_xor(float value, int32_t lane_mask)
{
    return __shfl_xor_sync(0xFFFFFFFFU, value, lane_mask);
}

WMTP_DEVICE float exp2_fast(float x)
{
    float y = 0.0F;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

WMTP_DEVICE Words4 load_16_bytes(void const* address)
{
    uint4 const raw = *static_cast<uint4 const*>(address);
    return Words4{{raw.x, raw.y, raw.z, raw.w}};
}

WMTP_DEVICE Words2 load_8_bytes(void const* address)
{
    uint2 const raw = *static_cast<uint2 const*>(address);
    return Words2{{raw.x, raw.y}};
}

WMTP_DEVICE void store_16_bytes(void* address, Words4 value)
{
    *static_cast<uint4*>(address) = make_uint4(value.w[0], value.w[1], value.w[2], value.w[3]);
}

WMTP_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector)
{
    return __byte_perm(low, high, selector);
}

template <DType kType>
WMTP_DEVICE uint32_t pack_pair(float low, float high)
{
    uint32_t packed = 0;
    if constexpr (kType == DType::kBFloat16)
    {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    else
    {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

//! Both halves times `factor`'s halves.
template <DType kType>
WMTP_DEVICE uint32_t multiply_pair(uint32_t pair, uint32_t factor)
{
    uint32_t product = 0;
    if constexpr (kType == DType::kBFloat16)
    {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(factor), "r"(0x80008000U));
    }
    else
    {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
    }
    return product;
}

//! c [16, 8] += a [16, 16] b [16, 8]; with g = lane / 4 and t = lane % 4 a lane holds
//! a: rows {g, g + 8, g, g + 8}, columns 2t and 2t + 1 (words 0, 1) and 2t + 8 and 2t + 9 (words 2, 3);
//! b: column g, rows 2t and 2t + 1 (word 0), 2t + 8 and 2t + 9 (word 1);
//! c: row g columns 2t and 2t + 1 (0, 1), row g + 8 likewise (2, 3).
template <DType kType>
WMTP_DEVICE void tensor_core_step(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2])
{
    if constexpr (kType == DType::kBFloat16)
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    else
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocks) entry(typename Kernel::Args const args)
{
    __shared__ typename Kernel::Shared shared;
    Kernel::body(args, shared);
}

template <class Kernel>
cudaError_t launch(Grid grid, typename Kernel::Args const& args, cudaStream_t stream)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0)
    {
        return cudaSuccess;
    }
    dim3 const blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
    entry<Kernel><<<blocks, Kernel::kThreads, 0, stream>>>(args);
    return cudaGetLastError();
}

#else // the emulator

inline int32_t thread_index()
{
    return emulation::current().thread;
}

inline int32_t block_x()
{
    return emulation::current().block[0];
}

inline int32_t block_y()
{
    return emulation::current().block[1];
}

inline int32_t block_z()
{
    return emulation::current().block[2];
}

inline void sync_block()
{
    emulation::sync_block();
}

inline float shuffle_xor(float value, int32_t lane_mask)
{
    return emulation::shuffle_xor(value, lane_mask);
}

inline float exp2_fast(float x)
{
    return emulation::exp2(x);
}

inline Words4 load_16_bytes(void const* address)
{
    Words4 value;
    emulation::copy_aligned(&value, address, sizeof(value));
    return value;
}

inline Words2 load_8_bytes(void const* address)
{
    Words2 value;
    emulation::copy_aligned(&value, address, sizeof(value));
    return value;
}

inline void store_16_bytes(void* address, Words4 value)
{
    emulation::copy_aligned(address, &value, sizeof(value));
}

inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector)
{
    uint64_t const bytes = static_cast<uint64_t>(high) << 32 | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i)
    {
        uint32_t const from = selector >> (4 * i) & 7U;
        out |= static_cast<uint32_t>(bytes >> (8 * from) & 0xFFU) << (8 * i);
    }
    return out;
}

template <DType kType>
inline float unpack_half(uint32_t bits)
{
    return kType == DType::kBFloat16 ? float_from_bf16(bits) : float_from_fp16(bits);
}

template <DType kType>
inline uint32_t pack_pair(float low, float high)
{
    return kType == DType::kBFloat16 ? bf16_from_float(low) | bf16_from_float(high) << 16
                                     : fp16_from_float(low) | fp16_from_float(high) << 16;
}

template <DType kType>
inline uint32_t multiply_pair(uint32_t pair, uint32_t factor)
{
    return pack_pair<kType>(unpack_half<kType>(pair & 0xFFFFU) * unpack_half<kType>(factor & 0xFFFFU),
        unpack_half<kType>(pair >> 16) * unpack_half<kType>(factor >> 16));
}

template <DType kType>
inline void tensor_core_step(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2])
{
    emulation::tensor_core_step(c, a, b, &unpack_half<kType>);
}

template <class Kernel>
cudaError_t launch(Grid grid, typename Kernel::Args const& args, cudaStream_t)
{
    return emulation::launch<Kernel>(grid.x, grid.y, grid.z, args);
}

#endif

//! Four e4m3 codes as two pairs of 16-bit numbers, exactly. The code's exponent and fraction are put where the 16-bit
//! format has its own, and one multiplication corrects the exponent bias, subnormal codes included. A NaN code reads as
//! +-480: `append` never stores one for a finite input.
template <DType kType>
WMTP_DEVICE Words2 expand_e4m3(uint32_t codes)
{
    // bfloat16: 2^120 = 2^(127 - 7); float16: 2^8 = 2^(15 - 7)
    constexpr uint32_t kFactor = kType == DType::kBFloat16 ? 0x7B807B80U : 0x5C005C00U;
    constexpr uint32_t kMagnitude = kType == DType::kBFloat16 ? 0x07F007F0U : 0x3F803F80U;
    constexpr int kShift = kType == DType::kBFloat16 ? 4 : 1;
    uint32_t const low = permute_bytes(codes, 0, 0x1404);
    uint32_t const high = permute_bytes(codes, 0, 0x3424);
    Words2 pairs;
    pairs.w[0] = multiply_pair<kType>((low & 0x80008000U) | ((low >> kShift) & kMagnitude), kFactor);
    pairs.w[1] = multiply_pair<kType>((high & 0x80008000U) | ((high >> kShift) & kMagnitude), kFactor);
    return pairs;
}

WMTP_DEVICE void store_floats(float* address, Floats4 value)
{
    store_16_bytes(
        address, Words4{{bits_of(value.f[0]), bits_of(value.f[1]), bits_of(value.f[2]), bits_of(value.f[3])}});
}

WMTP_DEVICE Floats4 load_floats(float const* address)
{
    Words4 const raw = load_16_bytes(address);
    return Floats4{{float_of(raw.w[0]), float_of(raw.w[1]), float_of(raw.w[2]), float_of(raw.w[3])}};
}

WMTP_DEVICE float maximum(float a, float b)
{
    return a > b ? a : b;
}

} // namespace wmtp::cuda
