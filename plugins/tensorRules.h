#pragma once

// Which tensors the plugin takes, and every rule about their ranks, dimensions and types.

#include <cstdint>

#include "attentionFields.h"
#include "tensorrt.h"
#include "wmtp/cuda/launch.hpp"

namespace wmtp::plugin
{

namespace input
{
constexpr int32_t kQ{0};               //!< [n_queries, num_q_heads, head_dim]
constexpr int32_t kK{1};               //!< [n_rows, num_kv_heads, head_dim]
constexpr int32_t kV{2};               //!< like k
constexpr int32_t kROW_OFFSETS{3};     //!< [n_requests + 1], int32
constexpr int32_t kQUERY_OFFSETS{4};   //!< [n_requests + 1], int32
constexpr int32_t kSTART_POSITIONS{5}; //!< [n_requests], int64
constexpr int32_t kLANES{6};           //!< [n_requests], int32
constexpr int32_t kRING_K{7};          //!< [n_lanes, capacity, num_kv_heads, head_dim]
constexpr int32_t kRING_V{8};          //!< like ring_k
constexpr int32_t kANCESTOR_MASK{9};   //!< [n_queries, words], int32 bits; absent for chains
constexpr int32_t kCOUNT_CHAIN{9};
constexpr int32_t kCOUNT_TREE{10};
} // namespace input

namespace output
{
constexpr int32_t kOUT{0};    //!< like q
constexpr int32_t kRING_K{1}; //!< the buffer of input ring_k
constexpr int32_t kRING_V{2}; //!< the buffer of input ring_v
constexpr int32_t kCOUNT{3};
} // namespace output

//! Input that shares the output's buffer, or -1.
int32_t aliasedInput(int32_t outputIndex);

char const* inputName(int32_t index);
char const* outputName(int32_t index);

//! Throws std::invalid_argument when the node has the wrong number of inputs or outputs.
void requireCounts(int32_t nbInputs, int32_t nbOutputs);

//! Throws std::invalid_argument when an input has the wrong rank; called before any dimension is known.
void requireRanks(nvinfer1::DimsExprs const* inputs, int32_t nbInputs);

//! Whether tensor `pos` may have its type and format, given those before it.
bool supportsTensor(
    AttentionFields const& fields, int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs);

//! Checks every rank, dimension and type and returns the shape to launch. Throws std::invalid_argument with value,
//! rule and remedy. What the launcher itself cannot run is refused in the launcher's words.
cuda::WindowedShape launchShape(AttentionFields const& fields, nvinfer1::PluginTensorDesc const* in, int32_t nbInputs,
    nvinfer1::PluginTensorDesc const* out, int32_t nbOutputs);

} // namespace wmtp::plugin
