// Sixteen lanes, AVX-512 F + BW + VL + DQ. Included inside an anonymous namespace.

constexpr int kLanes = 16;
constexpr int kTileVectors = 4;
constexpr int kTileRows = 6; // 24 accumulators and 4 loaded vectors; broadcasts are memory operands

using vf = __m512;

inline vf load(float const* p)
{
    return _mm512_loadu_ps(p);
}

inline void store(float* p, vf x)
{
    _mm512_storeu_ps(p, x);
}

inline vf set1(float x)
{
    return _mm512_set1_ps(x);
}

inline vf fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

inline vf max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

inline float hmax(vf a)
{
    return _mm512_reduce_max_ps(a);
}

inline float hsum(vf a)
{
    return _mm512_reduce_add_ps(a);
}

//! Lanes whose bit is clear become `fill`.
inline vf select_bits(uint64_t bits, vf a, float fill)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), static_cast<__mmask16>(bits & 0xFFFF), a);
}

inline vf round_nearest(vf x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

//! Low enough that the scaling instruction underflows to 0 by itself.
constexpr float kExp2Floor = -200.0F;

//! mantissa * 2^n for integral n >= kExp2Floor.
inline vf exp2_scale(vf mantissa, vf n, vf /*x*/)
{
    return _mm512_scalef_ps(mantissa, n);
}

inline bool any_above(vf a, float limit)
{
    return _mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}

inline vf load_bf16(uint16_t const* p)
{
    __m256i const raw = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

inline void transpose_16x16(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2)
    {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
    {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i)
    {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; ++i)
    {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

//! Transposes rows of 32-bit words (one float, or two neighbouring bfloat16) and hands column `word` of 16 keys to
//! `emit(word, key, column)`. Words at and after `n_words` are neither read nor emitted.
template <class Emit>
inline void pack_words(void const* const* rows, size_t offset, int n_words, LineWalk& next, Emit emit)
{
    for (int key = 0; key < kBlockKeys; key += 16)
    {
        for (int word = 0; word < n_words; word += 16)
        {
            int const n = n_words - word < 16 ? n_words - word : 16;
            __mmask16 const inside = static_cast<__mmask16>((1U << n) - 1);
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i)
            {
                r[i] = _mm512_maskz_loadu_epi32(inside, static_cast<char const*>(rows[key + i]) + offset + 4 * word);
                next.touch();
            }
            transpose_16x16(r);
            if (n == 16)
            {
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i)
                {
                    emit(word + i, key, r[i]);
                }
                continue;
            }
            for (int i = 0; i < n; ++i)
            {
                emit(word + i, key, r[i]);
            }
        }
    }
}

//! kt[d][key] <- K[key][d].
inline void pack_keys_f32(void const* const* rows, size_t offset, int head_dim, float* kt, LineWalk& next)
{
    pack_words(rows, offset, head_dim, next,
        [kt](int word, int key, __m512i column) { _mm512_storeu_si512(kt + word * kBlockKeys + key, column); });
}

//! A word holds elements 2w (low half) and 2w + 1 (high half); shifting a half to the top makes it a float.
inline void pack_keys_bf16(void const* const* rows, size_t offset, int head_dim, float* kt, LineWalk& next)
{
    pack_words(rows, offset, head_dim / 2, next,
        [kt](int word, int key, __m512i column)
        {
            float* const even = kt + 2 * word * kBlockKeys + key;
            _mm512_storeu_si512(even, _mm512_slli_epi32(column, 16));
            _mm512_storeu_si512(even + kBlockKeys, _mm512_and_si512(column, _mm512_set1_epi32(-65536)));
        });
}
