// bfloat16 conversion of single values. Included inside an anonymous namespace.

//! Round to nearest even; a NaN stays a quiet NaN.
inline uint16_t bf16_from_float(float x)
{
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U)
    {
        return static_cast<uint16_t>((bits >> 16) | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

inline float float_from_bf16(uint16_t x)
{
    uint32_t const bits = static_cast<uint32_t>(x) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}
