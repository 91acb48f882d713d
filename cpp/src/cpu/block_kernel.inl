// Attention of one block of keys, and the merging of softmax states, written once over the lane type that the
// including translation unit provides (simd_*.inl). Included inside an anonymous namespace.
//
// Shape of the computation: K is packed transposed, so that lanes are keys, a query element is a broadcast and no
// horizontal sum is needed; V needs no transposing because there lanes are head dimensions. Both products are then
// register tiles of kTileRows x kTileVectors accumulators. A row's arithmetic is the same in every tile height, so
// its result does not depend on how many rows share the call.

constexpr float kNegInfinity = -__builtin_inff();

//! 2^x for x <= 0, relative error below 1e-7; 2^-infinity is 0.
inline vf exp2_nonpositive(vf x)
{
    vf const clamped = max(x, set1(kExp2Floor));
    vf const n = round_nearest(clamped);
    vf const f = clamped - n;
    // Taylor coefficients ln2^k / k!: with |f| <= 1/2 the first omitted term is below 1e-8.
    vf p = set1(1.5252734e-5F);
    p = fma(p, f, set1(1.5403530e-4F));
    p = fma(p, f, set1(1.3333558e-3F));
    p = fma(p, f, set1(9.6181291e-3F));
    p = fma(p, f, set1(5.5504109e-2F));
    p = fma(p, f, set1(2.4022651e-1F));
    p = fma(p, f, set1(6.9314718e-1F));
    p = fma(p, f, set1(1.0F));
    return exp2_scale(p, n, x);
}

inline float exp2_nonpositive(float x)
{
    float lanes[kLanes];
    store(lanes, exp2_nonpositive(set1(x)));
    return lanes[0];
}

template <int kRows, bool kPrefetch>
inline void scores_tile(float const* q, int head_dim, float const* kt, float* s, LineWalk& shared_next)
{
    LineWalk next = shared_next;
    for (int key = 0; key < kBlockKeys; key += kTileVectors * kLanes)
    {
        vf acc[kRows][kTileVectors];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
#pragma GCC unroll 4
            for (int i = 0; i < kTileVectors; ++i)
            {
                acc[r][i] = set1(0.0F);
            }
        }
        for (int d = 0; d < head_dim; ++d)
        {
            if (kPrefetch)
            {
                next.touch();
                next.touch();
            }
            vf k[kTileVectors];
#pragma GCC unroll 4
            for (int i = 0; i < kTileVectors; ++i)
            {
                k[i] = load(kt + d * kBlockKeys + key + i * kLanes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
            {
                vf const query = set1(q[r * head_dim + d]);
#pragma GCC unroll 4
                for (int i = 0; i < kTileVectors; ++i)
                {
                    acc[r][i] = fma(query, k[i], acc[r][i]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
#pragma GCC unroll 4
            for (int i = 0; i < kTileVectors; ++i)
            {
                store(s + r * kBlockKeys + key + i * kLanes, acc[r][i]);
            }
        }
    }
    shared_next = next;
}

//! Turns a row of scores into weights and updates the row's maximum and sum. Returns what the accumulated values must
//! be multiplied with.
inline float softmax_row(float* s, uint64_t visible, float scale_log2, float& max_log2, float& sum)
{
    vf x[kBlockKeys / kLanes];
    vf top = set1(kNegInfinity);
#pragma GCC unroll 16
    for (int i = 0; i < kBlockKeys / kLanes; ++i)
    {
        x[i] = load(s + i * kLanes);
        if (visible != ~uint64_t{0})
        {
            x[i] = select_bits(visible >> (i * kLanes), x[i], kNegInfinity);
        }
        top = max(top, x[i]);
    }
    float const old_max = max_log2;
    float new_max = old_max;
    vf const scale = set1(scale_log2);
    // Along a long context the maximum rarely moves: the horizontal reduction waits until some lane exceeds it.
    if (any_above(top * scale, old_max))
    {
        new_max = hmax(top * scale);
    }
    vf const shift = set1(-new_max);
    vf total = set1(0.0F);
#pragma GCC unroll 16
    for (int i = 0; i < kBlockKeys / kLanes; ++i)
    {
        vf const weight = exp2_nonpositive(fma(x[i], scale, shift));
        total = total + weight;
        store(s + i * kLanes, weight);
    }
    float const correction = new_max == old_max ? 1.0F : exp2_nonpositive(old_max - new_max);
    max_log2 = new_max;
    sum = sum * correction + hsum(total);
    return correction;
}

//! Rows of V where they lie.
struct ValueRowsInPlace
{
    void const* const* rows;
    size_t offset;

    float const* row(int key) const
    {
        return reinterpret_cast<float const*>(static_cast<char const*>(rows[key]) + offset);
    }
};

//! Rows of V converted into scratch.
struct ValueRowsPacked
{
    float const* values;
    int stride;

    float const* row(int key) const
    {
        return values + key * stride;
    }
};

template <int kRows, int kVectors, bool kPrefetch, class Values>
inline void values_slice(float const* weights, Values const& values, int n_keys, int d, float const* correction,
    float* out, int out_stride, LineWalk& shared_next)
{
    LineWalk next = shared_next;
    vf acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
    {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
        {
            acc[r][i] = load(out + r * out_stride + d + i * kLanes) * set1(correction[r]);
        }
    }
    for (int key = 0; key < n_keys; ++key)
    {
        if (kPrefetch)
        {
            next.touch();
            next.touch();
        }
        float const* const row = values.row(key) + d;
        vf v[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
        {
            v[i] = load(row + i * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
        {
            vf const weight = set1(weights[r * kBlockKeys + key]);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i)
            {
                acc[r][i] = fma(weight, v[i], acc[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
    {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
        {
            store(out + r * out_stride + d + i * kLanes, acc[r][i]);
        }
    }
    shared_next = next;
}

template <int kRows, bool kPrefetch, class Values>
inline void values_tile(float const* weights, Values const& values, int n_keys, float const* correction, float* out,
    int out_stride, LineWalk& next)
{
    int d = 0;
    for (; d + kTileVectors * kLanes <= out_stride; d += kTileVectors * kLanes)
    {
        values_slice<kRows, kTileVectors, kPrefetch>(weights, values, n_keys, d, correction, out, out_stride, next);
    }
    for (; d < out_stride; d += kLanes)
    {
        values_slice<kRows, 1, kPrefetch>(weights, values, n_keys, d, correction, out, out_stride, next);
    }
}

//! Float32 arithmetic on packed K and any V.
template <class Values>
struct FloatMath
{
    using Query = float;
    float const* kt;
    Values values;
    float* s; //!< scores, then weights

    template <int kRows>
    void scores(Query const* q, int head_dim, LineWalk& next, bool first_tile) const
    {
        if (first_tile)
        {
            scores_tile<kRows, true>(q, head_dim, kt, s, next);
            return;
        }
        scores_tile<kRows, false>(q, head_dim, kt, s, next);
    }

    void weights_ready(int) const {}

    template <int kRows>
    void weighted_values(int n_keys, float const* correction, float* out, int out_stride, LineWalk& next,
        bool first_tile) const
    {
        if (first_tile)
        {
            values_tile<kRows, true>(s, values, n_keys, correction, out, out_stride, next);
            return;
        }
        values_tile<kRows, false>(s, values, n_keys, correction, out, out_stride, next);
    }
};

template <int kRows, class Math>
inline void tile(BlockTask const& task, Math const& math, int row, LineWalk& next)
{
    uint64_t visible[kRows];
    uint64_t any = 0;
    for (int r = 0; r < kRows; ++r)
    {
        visible[r] = task.visible == nullptr ? ~uint64_t{0} : task.visible[(row + r) / task.rows_per_mask];
        any |= visible[r];
    }
    if (any == 0)
    {
        return;
    }
    math.template scores<kRows>(static_cast<typename Math::Query const*>(task.q) + row * task.head_dim, task.head_dim, next, row == 0);
    float correction[kRows];
    for (int r = 0; r < kRows; ++r)
    {
        if (visible[r] == 0)
        {
            // Keeps the row's state untouched bit for bit, also while its maximum is still -infinity.
            correction[r] = 1.0F;
            for (int i = 0; i < kBlockKeys; i += kLanes)
            {
                store(math.s + r * kBlockKeys + i, set1(0.0F));
            }
        }
        else
        {
            correction[r] = softmax_row(math.s + r * kBlockKeys, visible[r], task.scale_log2,
                task.state.max_log2[row + r], task.state.sum[row + r]);
        }
        math.weights_ready(r);
    }
    int const stride = padded_dim(task.head_dim);
    math.template weighted_values<kRows>(task.n_keys, correction, task.state.acc + row * stride, stride, next, row == 0);
}

template <class Math>
inline void all_tiles(BlockTask const& task, Math const& math, LineWalk& next)
{
    int row = 0;
    for (; row + kTileRows <= task.n_rows; row += kTileRows)
    {
        tile<kTileRows>(task, math, row, next);
    }
    switch (task.n_rows - row)
    {
    case 1: tile<1>(task, math, row, next); break;
    case 2: tile<2>(task, math, row, next); break;
    case 3: tile<3>(task, math, row, next); break;
    case 4: tile<4>(task, math, row, next); break;
    case 5: tile<5>(task, math, row, next); break;
    default: break;
    }
}

inline void attend_f32(BlockTask const& task)
{
    int const head_dim = task.head_dim;
    int const stride = padded_dim(head_dim);
    float* const kt = static_cast<float*>(task.scratch);
    float* const packed_v = kt + kBlockKeys * head_dim;
    float* const s = packed_v + kBlockKeys * stride;
    LineWalk next_k(task.next_k_rows, task);
    LineWalk next_v(task.next_v_rows, task);
    pack_keys_f32(task.k_rows, task.head_offset_bytes, head_dim, kt, next_k);
    ValueRowsInPlace const in_place{task.v_rows, task.head_offset_bytes};
    if (head_dim == stride)
    {
        all_tiles(task, FloatMath<ValueRowsInPlace>{kt, in_place, s}, next_v);
        return;
    }
    // Whole vectors of a row would run past its end: compute on a padded copy.
    for (int key = 0; key < task.n_keys; ++key)
    {
        for (int d = 0; d < stride; ++d)
        {
            packed_v[key * stride + d] = d < head_dim ? in_place.row(key)[d] : 0.0F;
        }
    }
    all_tiles(task, FloatMath<ValueRowsPacked>{kt, ValueRowsPacked{packed_v, stride}, s}, next_v);
}

inline void attend_bf16(BlockTask const& task)
{
    int const head_dim = task.head_dim;
    int const stride = padded_dim(head_dim);
    float* const kt = static_cast<float*>(task.scratch);
    float* const packed_v = kt + kBlockKeys * head_dim;
    float* const s = packed_v + kBlockKeys * stride;
    LineWalk next_k(task.next_k_rows, task);
    LineWalk next_v(task.next_v_rows, task);
    pack_keys_bf16(task.k_rows, task.head_offset_bytes, head_dim, kt, next_k);
    for (int key = 0; key < task.n_keys; ++key)
    {
        uint16_t const* const row
            = reinterpret_cast<uint16_t const*>(static_cast<char const*>(task.v_rows[key]) + task.head_offset_bytes);
        int d = 0;
        for (; d + kLanes <= head_dim; d += kLanes)
        {
            store(packed_v + key * stride + d, load_bf16(row + d));
        }
        for (; d < stride; ++d)
        {
            uint32_t const bits = d < head_dim ? static_cast<uint32_t>(row[d]) << 16 : 0;
            __builtin_memcpy(packed_v + key * stride + d, &bits, sizeof(bits));
        }
    }
    all_tiles(task, FloatMath<ValueRowsPacked>{kt, ValueRowsPacked{packed_v, stride}, s}, next_v);
}

//! total <- total merged with part, where part covers later keys. A part that saw no key changes nothing.
inline void merge_row(SoftmaxState total, SoftmaxState part, int padded)
{
    float const part_max = *part.max_log2;
    if (part_max == kNegInfinity)
    {
        return;
    }
    float const old_max = *total.max_log2;
    float const new_max = part_max > old_max ? part_max : old_max;
    float const keep = exp2_nonpositive(old_max - new_max);
    float const gain = exp2_nonpositive(part_max - new_max);
    *total.max_log2 = new_max;
    *total.sum = *total.sum * keep + *part.sum * gain;
    for (int d = 0; d < padded; d += kLanes)
    {
        store(total.acc + d, fma(load(part.acc + d), set1(gain), load(total.acc + d) * set1(keep)));
    }
}

inline void finish_row_f32(SoftmaxState row, int head_dim, float* out)
{
    float const inverse = 1.0F / *row.sum;
    for (int d = 0; d < head_dim; ++d)
    {
        out[d] = row.acc[d] * inverse;
    }
}

inline void finish_row_bf16(SoftmaxState row, int head_dim, uint16_t* out)
{
    float const inverse = 1.0F / *row.sum;
    for (int d = 0; d < head_dim; ++d)
    {
        out[d] = bf16_from_float(row.acc[d] * inverse);
    }
}

inline double sum(float const* data, size_t n)
{
    constexpr int kStreams = 8;
    vf acc[kStreams];
    for (int i = 0; i < kStreams; ++i)
    {
        acc[i] = set1(0.0F);
    }
    size_t j = 0;
    for (; j + kStreams * kLanes <= n; j += kStreams * kLanes)
    {
#pragma GCC unroll 8
        for (int i = 0; i < kStreams; ++i)
        {
            acc[i] = acc[i] + load(data + j + i * kLanes);
        }
        __builtin_prefetch(data + j + 1024);
    }
    double total = 0.0;
    for (int i = 0; i < kStreams; ++i)
    {
        total += static_cast<double>(hsum(acc[i]));
    }
    for (; j < n; ++j)
    {
        total += static_cast<double>(data[j]);
    }
    return total;
}
