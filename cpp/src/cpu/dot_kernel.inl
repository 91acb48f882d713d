// bfloat16 queries on a bfloat16 cache with AVX-512 BF16: each multiply-add takes two neighbouring head dimensions
// (scores) or two neighbouring keys (values). Products are exact in float32; weights are rounded to bfloat16, as every
// bfloat16 attention does. Included inside an anonymous namespace after block_kernel.inl.

inline __m512 dot_pairs(__m512 acc, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

//! Sixteen dimensions of two neighbouring keys, as pairs: low_half takes the first 16 of 32, high_half the others.
inline __m512i low_half(__m512i even, __m512i odd)
{
    __m512i const order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
        37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(even, order, odd);
}

inline __m512i high_half(__m512i even, __m512i odd)
{
    __m512i const order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
        22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(even, order, odd);
}

//! Pairs of keys made once, for many tiles: [kBlockKeys / 2, padded_dim].
struct ValuePairsPacked
{
    int32_t const* pairs;
    int stride;

    template <int kVectors>
    void load(int pair, int d, __m512i* v) const
    {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
        {
            v[i] = _mm512_loadu_si512(pairs + pair * stride + d + i * kLanes);
        }
    }
};

//! Pairs of keys made while they are used: for a single tile, and head dimensions that fill the vectors.
struct ValuePairsInPlace
{
    void const* const* rows;
    size_t offset;

    template <int kVectors>
    void load(int pair, int d, __m512i* v) const
    {
        static_assert(kVectors % 2 == 0, "32 dimensions are loaded at a time");
        char const* const even = static_cast<char const*>(rows[2 * pair]) + offset + 2 * d;
        char const* const odd = static_cast<char const*>(rows[2 * pair + 1]) + offset + 2 * d;
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i += 2)
        {
            __m512i const a = _mm512_loadu_si512(even + 32 * i);
            __m512i const b = _mm512_loadu_si512(odd + 32 * i);
            v[i] = low_half(a, b);
            v[i + 1] = high_half(a, b);
        }
    }
};

template <class Values>
struct DotMath
{
    using Query = uint16_t;
    int32_t const* kt; //!< [head_dim / 2, kBlockKeys] pairs of dimensions
    Values values;
    float* s;         //!< scores
    int32_t* weights; //!< [rows, kBlockKeys / 2] pairs of keys

    template <int kRows>
    void scores(Query const* q, int head_dim, LineWalk& next, bool first_tile) const
    {
        if (first_tile)
        {
            scores_pairs<kRows, true>(q, head_dim, next);
            return;
        }
        scores_pairs<kRows, false>(q, head_dim, next);
    }

    template <int kRows, bool kPrefetch>
    void scores_pairs(Query const* q, int head_dim, LineWalk& shared_next) const
    {
        LineWalk next = shared_next;
        int32_t const* const pairs = reinterpret_cast<int32_t const*>(q);
        int const n_pairs = head_dim / 2;
        __m512 acc[kRows][kTileVectors];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
#pragma GCC unroll 4
            for (int i = 0; i < kTileVectors; ++i)
            {
                acc[r][i] = _mm512_setzero_ps();
            }
        }
        for (int d = 0; d < n_pairs; ++d)
        {
            if (kPrefetch)
            {
                next.touch();
                next.touch();
            }
            __m512i k[kTileVectors];
#pragma GCC unroll 4
            for (int i = 0; i < kTileVectors; ++i)
            {
                k[i] = _mm512_loadu_si512(kt + d * kBlockKeys + i * kLanes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
            {
                __m512i const query = _mm512_set1_epi32(pairs[r * n_pairs + d]);
#pragma GCC unroll 4
                for (int i = 0; i < kTileVectors; ++i)
                {
                    acc[r][i] = dot_pairs(acc[r][i], query, k[i]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
#pragma GCC unroll 4
            for (int i = 0; i < kTileVectors; ++i)
            {
                store(s + r * kBlockKeys + i * kLanes, acc[r][i]);
            }
        }
        shared_next = next;
    }

    void weights_ready(int r) const
    {
        for (int i = 0; i < kBlockKeys; i += 2 * kLanes)
        {
            float const* const row = s + r * kBlockKeys + i;
            __m512bh const pairs = _mm512_cvtne2ps_pbh(load(row + kLanes), load(row));
            _mm512_storeu_si512(weights + r * (kBlockKeys / 2) + i / 2, reinterpret_cast<__m512i>(pairs));
        }
    }

    template <int kRows, int kVectors, bool kPrefetch>
    void values_slice(
        int n_pairs, int d, float const* correction, float* out, int stride, LineWalk& shared_next) const
    {
        LineWalk next = shared_next;
        __m512 acc[kRows][kVectors];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i)
            {
                acc[r][i] = load(out + r * stride + d + i * kLanes) * set1(correction[r]);
            }
        }
        for (int pair = 0; pair < n_pairs; ++pair)
        {
            if (kPrefetch)
            {
                next.touch();
                next.touch();
            }
            __m512i v[kVectors];
            values.template load<kVectors>(pair, d, v);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
            {
                __m512i const weight = _mm512_set1_epi32(weights[r * (kBlockKeys / 2) + pair]);
#pragma GCC unroll 4
                for (int i = 0; i < kVectors; ++i)
                {
                    acc[r][i] = dot_pairs(acc[r][i], weight, v[i]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i)
            {
                store(out + r * stride + d + i * kLanes, acc[r][i]);
            }
        }
        shared_next = next;
    }

    template <int kRows, bool kPrefetch>
    void values_pairs(int n_keys, float const* correction, float* out, int stride, LineWalk& next) const
    {
        int const n_pairs = (n_keys + 1) / 2;
        int d = 0;
        for (; d + kTileVectors * kLanes <= stride; d += kTileVectors * kLanes)
        {
            values_slice<kRows, kTileVectors, kPrefetch>(n_pairs, d, correction, out, stride, next);
        }
        if constexpr (std::is_same_v<Values, ValuePairsPacked>)
        {
            for (; d < stride; d += kLanes)
            {
                values_slice<kRows, 1, kPrefetch>(n_pairs, d, correction, out, stride, next);
            }
        }
    }

    template <int kRows>
    void weighted_values(
        int n_keys, float const* correction, float* out, int stride, LineWalk& next, bool first_tile) const
    {
        if (first_tile)
        {
            values_pairs<kRows, true>(n_keys, correction, out, stride, next);
            return;
        }
        values_pairs<kRows, false>(n_keys, correction, out, stride, next);
    }
};

//! vp[pair][d] <- (V[2 pair][d], V[2 pair + 1][d]), zero padded.
inline void pack_value_pairs(BlockTask const& task, int stride, int32_t* vp)
{
    int const head_dim = task.head_dim;
    for (int key = 0; key < task.n_keys; key += 2)
    {
        char const* const even = static_cast<char const*>(task.v_rows[key]) + task.head_offset_bytes;
        char const* const odd = static_cast<char const*>(task.v_rows[key + 1]) + task.head_offset_bytes;
        int32_t* const out = vp + key / 2 * stride;
        for (int d = 0; d < head_dim; d += 32)
        {
            int const left = head_dim - d;
            __mmask32 const inside = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
            __m512i const a = _mm512_maskz_loadu_epi16(inside, even + 2 * d);
            __m512i const b = _mm512_maskz_loadu_epi16(inside, odd + 2 * d);
            _mm512_storeu_si512(out + d, low_half(a, b));
            if (left > 16)
            {
                _mm512_storeu_si512(out + d + 16, high_half(a, b));
            }
        }
    }
}

inline void attend_bf16_dot(BlockTask const& task)
{
    int const head_dim = task.head_dim;
    int const stride = padded_dim(head_dim);
    int32_t* const kt = static_cast<int32_t*>(task.scratch);
    int32_t* const vp = kt + kBlockKeys / 2 * head_dim;
    float* const s = reinterpret_cast<float*>(vp + kBlockKeys / 2 * stride);
    int32_t* const weights = reinterpret_cast<int32_t*>(s + kMaxTileRows * kBlockKeys);
    LineWalk next_k(task.next_k_rows, task);
    LineWalk next_v(task.next_v_rows, task);
    pack_words(task.k_rows, task.head_offset_bytes, head_dim / 2, next_k,
        [kt](int word, int key, __m512i column) { _mm512_storeu_si512(kt + word * kBlockKeys + key, column); });
    if (task.n_rows <= kTileRows && head_dim % (kTileVectors * kLanes) == 0)
    {
        ValuePairsInPlace const in_place{task.v_rows, task.head_offset_bytes};
        all_tiles(task, DotMath<ValuePairsInPlace>{kt, in_place, s, weights}, next_v);
        return;
    }
    pack_value_pairs(task, stride, vp);
    all_tiles(task, DotMath<ValuePairsPacked>{kt, ValuePairsPacked{vp, stride}, s, weights}, next_v);
}
