// Eight lanes, AVX2 + FMA. Included inside an anonymous namespace.

constexpr int kLanes = 8;
constexpr int kTileVectors = 2;
constexpr int kTileRows = 6; // 12 accumulators, 2 loaded vectors, 1 broadcast: 15 of 16 registers

using vf = __m256;

inline vf load(float const* p)
{
    return _mm256_loadu_ps(p);
}

inline void store(float* p, vf x)
{
    _mm256_storeu_ps(p, x);
}

inline vf set1(float x)
{
    return _mm256_set1_ps(x);
}

inline vf fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

inline vf max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

inline float hmax(vf a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    x = _mm_max_ss(x, _mm_movehdup_ps(x));
    return _mm_cvtss_f32(x);
}

inline float hsum(vf a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    x = _mm_add_ss(x, _mm_movehdup_ps(x));
    return _mm_cvtss_f32(x);
}

//! Lanes whose bit is clear become `fill`.
inline vf select_bits(uint64_t bits, vf a, float fill)
{
    __m256i const lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i const set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xFF)), lane_bit);
    return _mm256_blendv_ps(_mm256_set1_ps(fill), a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane_bit)));
}

inline vf round_nearest(vf x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

//! Weights under 2^-126 count as 0: the exponent arithmetic below reaches no further.
constexpr float kExp2Floor = -126.0F;

//! mantissa * 2^n for integral n >= kExp2Floor, and 0 where x lies below that.
inline vf exp2_scale(vf mantissa, vf n, vf x)
{
    __m256i const exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    vf const value = _mm256_mul_ps(mantissa, _mm256_castsi256_ps(exponent));
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(kExp2Floor), _CMP_GE_OQ), value);
}

inline bool any_above(vf a, float limit)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
}

inline vf load_bf16(uint16_t const* p)
{
    __m128i const raw = _mm_loadu_si128(reinterpret_cast<__m128i const*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

inline void transpose_8x8(vf r[8])
{
    vf t[8];
    for (int i = 0; i < 8; i += 2)
    {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
    {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i)
    {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i)
    {
        r[i] = t[i];
    }
}

template <class LoadRow>
inline void pack_keys(void const* const* rows, int head_dim, float* kt, LineWalk& next, LoadRow load_row)
{
    for (int key = 0; key < kBlockKeys; key += 8)
    {
        for (int d = 0; d < head_dim; d += 8)
        {
            vf r[8];
            for (int i = 0; i < 8; ++i)
            {
                next.touch();
                r[i] = load_row(static_cast<char const*>(rows[key + i]), d);
            }
            transpose_8x8(r);
            for (int i = 0; i < 8; ++i)
            {
                store(kt + (d + i) * kBlockKeys + key, r[i]);
            }
        }
    }
}

//! kt[d][key] <- K[key][d].
inline void pack_keys_f32(void const* const* rows, size_t offset, int head_dim, float* kt, LineWalk& next)
{
    pack_keys(rows, head_dim, kt, next,
        [offset](char const* row, int d) { return load(reinterpret_cast<float const*>(row + offset) + d); });
}

inline void pack_keys_bf16(void const* const* rows, size_t offset, int head_dim, float* kt, LineWalk& next)
{
    pack_keys(rows, head_dim, kt, next,
        [offset](char const* row, int d) { return load_bf16(reinterpret_cast<uint16_t const*>(row + offset) + d); });
}
