// Gated DeltaNet over one head, written once over the lane type. Included inside an anonymous namespace.
//
// Columns of the state never mix, so the state is taken kDeltaSlice columns at a time: a slice stays in the
// first-level cache while all rows pass over it.

template <int kVectors>
inline void delta_slice_rows(GatedDeltaHead const& head, int column)
{
    int const key_dim = head.key_dim;
    float const* in = head.state_in + column;
    int64_t in_stride = head.value_dim;
    float* const held = head.scratch;
    for (int t = 0; t < head.n_rows; ++t)
    {
        vf const decay = set1(head.decay[t]);
        float const* const k = head.k + t * key_dim;
        float const* const q = head.q + t * key_dim;
        vf recalled[kVectors];
        for (int i = 0; i < kVectors; ++i)
        {
            recalled[i] = set1(0.0F);
        }
        for (int d = 0; d < key_dim; ++d)
        {
            vf const key = set1(k[d]);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i)
            {
                vf const s = load(in + d * in_stride + i * kLanes) * decay;
                recalled[i] = fma(s, key, recalled[i]);
            }
        }
        vf delta[kVectors];
        vf out[kVectors];
        for (int i = 0; i < kVectors; ++i)
        {
            int64_t const at = t * head.value_stride + column + i * kLanes;
            delta[i] = (load(head.v + at) - recalled[i]) * set1(head.beta[t]);
            store(head.delta + at, delta[i]);
            out[i] = set1(0.0F);
        }
        for (int d = 0; d < key_dim; ++d)
        {
            vf const key = set1(k[d]);
            vf const query = set1(q[d]);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i)
            {
                vf const s = fma(key, delta[i], load(in + d * in_stride + i * kLanes) * decay);
                store(held + d * kDeltaSlice + i * kLanes, s);
                out[i] = fma(s, query, out[i]);
            }
        }
        for (int i = 0; i < kVectors; ++i)
        {
            store(head.out + t * head.value_stride + column + i * kLanes, out[i]);
        }
        in = held;
        in_stride = kDeltaSlice;
    }
}

template <int kVectors>
inline void delta_slice_commit(GatedDeltaHead const& head, int column)
{
    for (int t = 0; t < head.n_rows; ++t)
    {
        vf const decay = set1(head.decay[t]);
        float const* const k = head.k + t * head.key_dim;
        vf delta[kVectors];
        for (int i = 0; i < kVectors; ++i)
        {
            delta[i] = load(head.delta + t * head.value_stride + column + i * kLanes);
        }
        for (int d = 0; d < head.key_dim; ++d)
        {
            vf const key = set1(k[d]);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i)
            {
                float* const s = head.state_out + d * static_cast<int64_t>(head.value_dim) + column + i * kLanes;
                store(s, fma(key, delta[i], load(s) * decay));
            }
        }
    }
}

template <class Slice, class Narrow>
inline void each_slice(int value_dim, Slice slice, Narrow narrow)
{
    int column = 0;
    for (; column + kDeltaSlice <= value_dim; column += kDeltaSlice)
    {
        slice(column);
    }
    for (; column < value_dim; column += kLanes)
    {
        narrow(column);
    }
}

inline void gated_delta_rows(GatedDeltaHead const& head)
{
    each_slice(
        head.value_dim, [&](int column) { delta_slice_rows<kDeltaSlice / kLanes>(head, column); },
        [&](int column) { delta_slice_rows<1>(head, column); });
}

inline void gated_delta_commit(GatedDeltaHead const& head)
{
    each_slice(
        head.value_dim, [&](int column) { delta_slice_commit<kDeltaSlice / kLanes>(head, column); },
        [&](int column) { delta_slice_commit<1>(head, column); });
}
