#pragma once

// Gated DeltaNet rows (the recurrence of Qwen3-Next's linear layers), float32:
//   S <- exp(g_t) S;  delta_t = beta_t (v_t - S^T k_t);  S <- S + k_t delta_t^T;  out_t = S^T q_t
// with k_t and q_t divided by sqrt(sum of squares + 1e-6), and q_t also by sqrt(Dk).

#include <cstdint>

namespace wmtp
{

struct GatedDeltaShape
{
    int32_t n_requests;
    int32_t n_rows; //!< rows per request
    int32_t n_key_heads;
    int32_t n_value_heads; //!< value head h reads key head h / (n_value_heads / n_key_heads)
    int32_t key_dim;
    int32_t value_dim;
    int64_t n_slots; //!< states in the pool
};

//! Answers n_rows rows from the state each request has; the state itself is left as it was.
//! q, k [B, T, Hk, Dk]; v, out, delta [B, T, Hv, Dv]; g, beta [B, T, Hv]; state [slots, Hv, Dk, Dv].
void gated_delta_rows(float const* q, float const* k, float const* v, float const* g, float const* beta,
    float const* state, int32_t const* slots, GatedDeltaShape shape, float* out, float* delta, int n_threads);

//! Replays the first counts[b] rows of each request into its state. Bit-identical to having stored the state after
//! that row: the same operations run in the same order.
void gated_delta_commit(float const* k, float const* g, float const* delta, float* state, int32_t const* slots,
    int32_t const* counts, GatedDeltaShape shape, int n_threads);

} // namespace wmtp
