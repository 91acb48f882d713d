// Four lanes of portable vector code: SSE2 on x86-64, NEON on aarch64. Included inside an anonymous namespace.

constexpr int kLanes = 4;
constexpr int kTileVectors = 2;
constexpr int kTileRows = 6;

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

inline vf load(float const* p)
{
    vf x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
}

inline void store(float* p, vf x)
{
    __builtin_memcpy(p, &x, sizeof(x));
}

inline vf set1(float x)
{
    return vf{x, x, x, x};
}

inline vf fma(vf a, vf b, vf c)
{
#if defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

inline vf max(vf a, vf b)
{
    return a > b ? a : b;
}

inline float hmax(vf a)
{
    float const lo = a[0] > a[1] ? a[0] : a[1];
    float const hi = a[2] > a[3] ? a[2] : a[3];
    return lo > hi ? lo : hi;
}

inline float hsum(vf a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}

//! Lanes whose bit is clear become `fill`.
inline vf select_bits(uint64_t bits, vf a, float fill)
{
    vf out = a;
    for (int i = 0; i < kLanes; ++i)
    {
        out[i] = (bits >> i & 1) != 0 ? a[i] : fill;
    }
    return out;
}

inline vf round_nearest(vf x)
{
    vf const magic = set1(12582912.0F); // 1.5 * 2^23: adding it leaves no fraction bits
    return (x + magic) - magic;
}

//! Weights under 2^-126 count as 0: the exponent arithmetic below reaches no further.
constexpr float kExp2Floor = -126.0F;

//! mantissa * 2^n for integral n >= kExp2Floor, and 0 where x lies below that.
inline vf exp2_scale(vf mantissa, vf n, vf x)
{
    vi const exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    vf factor;
    __builtin_memcpy(&factor, &exponent, sizeof(factor));
    return x < set1(kExp2Floor) ? set1(0.0F) : mantissa * factor;
}

inline bool any_above(vf a, float limit)
{
    vi const above = a > set1(limit);
    return (above[0] | above[1] | above[2] | above[3]) != 0;
}

inline vf load_bf16(uint16_t const* p)
{
    vi bits;
    for (int i = 0; i < kLanes; ++i)
    {
        bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    }
    vf x;
    __builtin_memcpy(&x, &bits, sizeof(x));
    return x;
}

//! kt[d][key] <- K[key][d].
inline void pack_keys_f32(void const* const* rows, size_t offset, int head_dim, float* kt, LineWalk& next)
{
    for (int key = 0; key < kBlockKeys; ++key)
    {
        float const* row = reinterpret_cast<float const*>(static_cast<char const*>(rows[key]) + offset);
        for (int d = 0; d < head_dim; ++d)
        {
            if (d % 16 == 0)
            {
                next.touch();
            }
            kt[d * kBlockKeys + key] = row[d];
        }
    }
}

inline void pack_keys_bf16(void const* const* rows, size_t offset, int head_dim, float* kt, LineWalk& next)
{
    for (int key = 0; key < kBlockKeys; ++key)
    {
        uint16_t const* row = reinterpret_cast<uint16_t const*>(static_cast<char const*>(rows[key]) + offset);
        for (int d = 0; d < head_dim; d += kLanes)
        {
            if (d % 32 == 0)
            {
                next.touch();
            }
            vf const x = load_bf16(row + d);
            for (int i = 0; i < kLanes; ++i)
            {
                kt[(d + i) * kBlockKeys + key] = x[i];
            }
        }
    }
}
