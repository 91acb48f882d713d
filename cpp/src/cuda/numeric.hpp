#pragma once

// Bits of the 16-bit and 8-bit formats, host and device alike, so that a host test can check every code.

#include <cstdint>
#include <cstring>

#include "wmtp/cuda/launch.hpp"
#include "wmtp/platform.hpp"

namespace wmtp::cuda
{

constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kE4m3Max = 448.0F;

WMTP_HD uint32_t bits_of(float value)
{
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
#endif
}

WMTP_HD float float_of(uint32_t bits)
{
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value = 0.0F;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
#endif
}

WMTP_HD float negative_infinity()
{
    return float_of(0xFF800000U);
}

WMTP_HD int32_t bytes_per_element(DType type)
{
    return type == DType::kFloat32 ? 4 : type == DType::kFloat8E4M3 ? 1 : 2;
}

WMTP_HD uint32_t bf16_from_float(float value)
{
    uint32_t const bits = bits_of(value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U)
    {
        return (bits >> 16) | 0x40U; // NaN stays NaN
    }
    return (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
}

WMTP_HD float float_from_bf16(uint32_t bits)
{
    return float_of(bits << 16);
}

WMTP_HD uint32_t fp16_from_float(float value)
{
#if defined(__CUDA_ARCH__)
    uint16_t half = 0;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    uint32_t const bits = bits_of(value);
    uint32_t const sign = (bits >> 16) & 0x8000U;
    uint32_t const magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)
    {
        return sign | 0x7E00U;
    }
    if (magnitude >= 0x477FF000U) // 65520 rounds to infinity
    {
        return sign | 0x7C00U;
    }
    if (magnitude < 0x38800000U) // below the smallest normal number: adding 0.5 puts units of 2^-24 in the low bits
    {
        return sign | (bits_of(float_of(magnitude) + 0.5F) - 0x3F000000U);
    }
    uint32_t const rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    return sign | ((rounded - 0x38000000U) >> 13);
#endif
}

WMTP_HD float float_from_fp16(uint32_t bits)
{
#if defined(__CUDA_ARCH__)
    float value = 0.0F;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
#else
    uint32_t const sign = (bits & 0x8000U) << 16;
    uint32_t const exponent = (bits >> 10) & 0x1FU;
    uint32_t const fraction = bits & 0x3FFU;
    if (exponent == 0)
    {
        float const value = static_cast<float>(fraction) * 5.9604644775390625e-8F; // 2^-24
        return float_of(bits_of(value) | sign);
    }
    if (exponent == 31)
    {
        return float_of(sign | 0x7F800000U | (fraction << 13));
    }
    return float_of(sign | ((exponent + 112U) << 23) | (fraction << 13));
#endif
}

//! Nearest e4m3 code, ties to even, clamped to +-448. NaN stays NaN.
WMTP_HD uint32_t e4m3_from_float(float value)
{
    uint32_t const bits = bits_of(value);
    uint32_t const sign = (bits >> 24) & 0x80U;
    uint32_t const magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)
    {
        return sign | 0x7FU;
    }
    if (magnitude >= 0x43E00000U) // 448
    {
        return sign | 0x7EU;
    }
    if (magnitude < 0x3C800000U) // below 2^-6: adding 2^14 puts units of 2^-9 in the low bits
    {
        return sign | (bits_of(float_of(magnitude) + 16384.0F) - 0x46800000U);
    }
    uint32_t const rounded = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
    return sign | ((rounded - 0x3C000000U) >> 20);
}

WMTP_HD float float_from_e4m3(uint32_t code)
{
    uint32_t const exponent = (code >> 3) & 0xFU;
    uint32_t const fraction = code & 0x7U;
    float value = 0.0F;
    if ((code & 0x7FU) == 0x7FU)
    {
        value = float_of(0x7FC00000U);
    }
    else if (exponent == 0)
    {
        value = static_cast<float>(fraction) * 0.001953125F; // 2^-9
    }
    else
    {
        value = float_of(((exponent + 120U) << 23) | (fraction << 20));
    }
    return (code & 0x80U) != 0 ? -value : value;
}

WMTP_HD float load_element(void const* data, DType type, int64_t index)
{
    switch (type)
    {
    case DType::kFloat32: return static_cast<float const*>(data)[index];
    case DType::kBFloat16: return float_from_bf16(static_cast<uint16_t const*>(data)[index]);
    case DType::kFloat16: return float_from_fp16(static_cast<uint16_t const*>(data)[index]);
    case DType::kFloat8E4M3: return float_from_e4m3(static_cast<uint8_t const*>(data)[index]);
    }
    return 0.0F;
}

WMTP_HD void store_element(void* data, DType type, int64_t index, float value)
{
    switch (type)
    {
    case DType::kFloat32: static_cast<float*>(data)[index] = value; return;
    case DType::kBFloat16: static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(bf16_from_float(value)); return;
    case DType::kFloat16: static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(fp16_from_float(value)); return;
    case DType::kFloat8E4M3: static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(e4m3_from_float(value)); return;
    }
}

} // namespace wmtp::cuda
