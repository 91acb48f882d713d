#pragma once

// The plugin's fields: read from a PluginFieldCollection, validated once, written back for the engine.

#include <cstdint>
#include <string>
#include <vector>

#include "tensorrt.h"

namespace wmtp::plugin
{

//! Element type of the ring.
enum class KvDtype : int32_t
{
    kROWS, //!< whatever the rows have
    kFLOAT,
    kHALF,
    kBF16,
    kFP8,
};

struct AttentionFields
{
    int64_t nSink{};
    int64_t window{};
    int64_t capacity{};
    int32_t numQHeads{};
    int32_t numKvHeads{};
    int32_t headDim{};
    float scale{};
    KvDtype kvDtype{KvDtype::kROWS};
    float kScale{1.0F}; //!< value = kScale * stored; fp8 rings only
    float vScale{1.0F};
    int64_t workspaceBytes{}; //!< what the builder reserved; 0 before it has
};

//! Names and types that a creator announces. Lives as long as the library.
nvinfer1::PluginFieldCollection const& fieldNames();

//! Reads and validates. Throws std::invalid_argument with value, rule and remedy. `phase` says whether the private
//! field that only an engine carries is expected.
AttentionFields readFields(nvinfer1::PluginFieldCollection const* collection, nvinfer1::TensorRTPhase phase);

//! The fields as an engine stores them. Points into itself: neither copied nor moved.
class SerializedFields
{
public:
    SerializedFields() = default;
    SerializedFields(SerializedFields const&) = delete;
    SerializedFields& operator=(SerializedFields const&) = delete;

    nvinfer1::PluginFieldCollection const* store(AttentionFields const& fields);

private:
    AttentionFields mFields;
    std::vector<nvinfer1::PluginField> mEntries;
    nvinfer1::PluginFieldCollection mCollection;
};

//! One line for the engine inspector.
std::string describe(AttentionFields const& fields);

} // namespace wmtp::plugin
