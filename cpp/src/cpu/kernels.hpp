#pragma once

// The table of functions that every instruction set fills. Plain structs and pointers only: nothing here may emit
// code, because the translation units that include it are compiled with different flags.

#include <cstddef>
#include <cstdint>

namespace wmtp::cpu
{

//! Keys are processed in blocks of this many positions, aligned in positions. Alignment depends on nothing else, so a
//! row's result does not depend on which rows, requests or cache layout it is computed with.
constexpr int kBlockKeys = 64;

//! Partial softmax states are merged at these positions, always in order: neither does the result depend on the
//! number of threads.
constexpr int64_t kChunkKeys = 2048;

//! head_dim rounded up to what the accumulators are padded to.
constexpr int padded_dim(int head_dim)
{
    return (head_dim + 15) / 16 * 16;
}

//! Softmax state of rows: running maximum of the scores in units of log2, sum of weights, weighted sum of values.
struct SoftmaxState
{
    float* max_log2;
    float* sum;
    float* acc; //!< [rows, padded_dim]
};

//! One KV head, one block of keys, all query rows that read it.
struct BlockTask
{
    void const* const* k_rows; //!< [kBlockKeys] token rows; a key nobody sees points at zeros
    void const* const* v_rows;
    void const* const* next_k_rows; //!< [n_next_rows] token rows to prefetch meanwhile
    void const* const* next_v_rows;
    int n_next_rows;
    int next_row_bytes; //!< of each row, from next_offset_bytes on
    size_t next_offset_bytes;
    size_t head_offset_bytes; //!< of this head inside a token row
    int n_keys;               //!< keys after this one are seen by nobody
    int head_dim;
    int n_rows;
    int rows_per_mask;       //!< consecutive rows that share a mask: the query heads of one token
    uint64_t const* visible; //!< [n_rows / rows_per_mask] bit per key; null when everything is visible
    void const* q;           //!< [n_rows, head_dim] in the compute type
    float scale_log2;        //!< softmax scale times log2(e)
    SoftmaxState state;
    void* scratch; //!< block_scratch_bytes(head_dim)
};

constexpr int kMaxTileRows = 8;

//! Packed K, packed V, and one tile of scores and of weights.
constexpr size_t block_scratch_bytes(int head_dim)
{
    return static_cast<size_t>(kBlockKeys) * 4
        * (static_cast<size_t>(head_dim) + static_cast<size_t>(padded_dim(head_dim)) + 2 * kMaxTileRows);
}

struct GatedDeltaHead
{
    float const* q;     //!< [n_rows, key_dim], normalised and scaled; null for a commit
    float const* k;     //!< [n_rows, key_dim], normalised
    float const* v;     //!< row stride value_stride
    float const* decay; //!< [n_rows] exp(g)
    float const* beta;  //!< [n_rows]
    int64_t value_stride;
    float const* state_in; //!< [key_dim, value_dim]
    float* state_out;      //!< where to leave the state, or null
    float* out;            //!< row stride value_stride
    float* delta;          //!< written by rows, read by commit
    int n_rows;
    int key_dim;
    int value_dim;
    float* scratch; //!< [key_dim, kDeltaSlice]
};

constexpr int kDeltaSlice = 32;

struct KernelTable
{
    char const* name;
    bool bf16_dot; //!< bfloat16 queries are multiplied with bfloat16 keys directly, so `q` holds bfloat16
    void (*attend_f32)(BlockTask const&);
    void (*attend_bf16)(BlockTask const&);     //!< bfloat16 cache, float32 queries
    void (*attend_bf16_dot)(BlockTask const&); //!< bfloat16 cache and queries; null unless bf16_dot
    void (*merge_row)(SoftmaxState total, SoftmaxState part, int padded_dim);
    void (*finish_row_f32)(SoftmaxState row, int head_dim, float* out);
    void (*finish_row_bf16)(SoftmaxState row, int head_dim, uint16_t* out);
    void (*gated_delta_rows)(GatedDeltaHead const&);
    void (*gated_delta_commit)(GatedDeltaHead const&);
    double (*sum)(float const* data, size_t n);
};

extern KernelTable const kGenericKernels;
extern KernelTable const kAvx2Kernels;
extern KernelTable const kAvx512Kernels;
extern KernelTable const kAvx512Bf16Kernels;

//! The table that set_isa chose.
KernelTable const& kernels();

} // namespace wmtp::cpu
