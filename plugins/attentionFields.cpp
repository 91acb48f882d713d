#include "attentionFields.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "wmtp/cuda/launch.hpp"

namespace wmtp::plugin
{

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

namespace
{

struct KvDtypeName
{
    KvDtype dtype;
    std::string_view name;
};

constexpr std::array<KvDtypeName, 5> kKV_DTYPES{{{KvDtype::kROWS, "auto"}, {KvDtype::kFLOAT, "float32"},
    {KvDtype::kHALF, "float16"}, {KvDtype::kBF16, "bfloat16"}, {KvDtype::kFP8, "fp8"}}};
constexpr char const* kKV_DTYPE_RULE{"must be auto, float32, float16, bfloat16 or fp8"};

//! Only engines carry it: the scratch memory that was reserved when the engine was built.
constexpr char const* kWORKSPACE_FIELD{"workspace_bytes"};

std::vector<PluginField> const& announced()
{
    static std::vector<PluginField> const fields{
        {"n_sink", nullptr, PluginFieldType::kINT64, 1},
        {"window", nullptr, PluginFieldType::kINT64, 1},
        {"capacity", nullptr, PluginFieldType::kINT64, 1},
        {"num_q_heads", nullptr, PluginFieldType::kINT32, 1},
        {"num_kv_heads", nullptr, PluginFieldType::kINT32, 1},
        {"head_dim", nullptr, PluginFieldType::kINT32, 1},
        {"scale", nullptr, PluginFieldType::kFLOAT32, 1},
        {"kv_dtype", nullptr, PluginFieldType::kCHAR, 1},
        {"k_scale", nullptr, PluginFieldType::kFLOAT32, 1},
        {"v_scale", nullptr, PluginFieldType::kFLOAT32, 1},
    };
    return fields;
}

[[noreturn]] void refuse(std::string const& message)
{
    throw std::invalid_argument(message);
}

void require(bool holds, std::string const& message)
{
    if (!holds)
    {
        refuse(message);
    }
}

std::string named(char const* name, int64_t value)
{
    return std::string{name} + " " + std::to_string(value);
}

class FieldReader
{
public:
    FieldReader(PluginFieldCollection const* collection, TensorRTPhase phase)
        : mCollection{collection}
    {
        require(collection != nullptr && (collection->nbFields == 0 || collection->fields != nullptr),
            "field collection is null: a plugin needs its fields; pass n_sink, window, capacity, num_q_heads, "
            "num_kv_heads and head_dim");
        for (int32_t i = 0; i < collection->nbFields; ++i)
        {
            checkKnown(collection->fields[i], phase);
            for (int32_t j = 0; j < i; ++j)
            {
                require(std::strcmp(collection->fields[i].name, collection->fields[j].name) != 0,
                    std::string{"field "} + collection->fields[i].name + " is given twice: pass it once");
            }
        }
    }

    int64_t integer(char const* name) const
    {
        PluginField const* field = find(name);
        require(field != nullptr, std::string{"field "} + name + " is missing: it has no default; pass an integer");
        require(field->data != nullptr && field->length == 1,
            std::string{"field "} + name + " has " + std::to_string(field->length)
                + " elements: it is one number; pass one integer");
        switch (field->type)
        {
        case PluginFieldType::kINT32: return load<int32_t>(*field);
        case PluginFieldType::kINT64: return load<int64_t>(*field);
        default: break;
        }
        refuse(std::string{"field "} + name + " has PluginFieldType " + std::to_string(static_cast<int>(field->type))
            + ": must be kINT32 or kINT64; pass an integer");
    }

    int32_t smallInteger(char const* name) const
    {
        int64_t const value = integer(name);
        require(value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
            named(name, value) + ": does not fit 32 bits; pass a count");
        return static_cast<int32_t>(value);
    }

    float number(char const* name, float byDefault) const
    {
        PluginField const* field = find(name);
        if (field == nullptr)
        {
            return byDefault;
        }
        require(field->data != nullptr && field->length == 1 && field->type == PluginFieldType::kFLOAT32,
            std::string{"field "} + name + " has " + std::to_string(field->length) + " elements of PluginFieldType "
                + std::to_string(static_cast<int>(field->type)) + ": must be one kFLOAT32; pass one float");
        return load<float>(*field);
    }

    std::string text(char const* name, char const* byDefault) const
    {
        PluginField const* field = find(name);
        if (field == nullptr)
        {
            return byDefault;
        }
        require(field->data != nullptr && field->length >= 0 && field->type == PluginFieldType::kCHAR,
            std::string{"field "} + name + " has PluginFieldType " + std::to_string(static_cast<int>(field->type))
                + ": must be kCHAR; pass a string");
        std::string value(static_cast<char const*>(field->data), static_cast<size_t>(field->length));
        return value.substr(0, value.find('\0'));
    }

private:
    template <typename T>
    static T load(PluginField const& field)
    {
        T value;
        std::memcpy(&value, field.data, sizeof(T));
        return value;
    }

    static void checkKnown(PluginField const& field, TensorRTPhase phase)
    {
        require(field.name != nullptr, "a field has no name: name every field");
        if (phase == TensorRTPhase::kRUNTIME && std::strcmp(field.name, kWORKSPACE_FIELD) == 0)
        {
            return;
        }
        std::string known;
        for (PluginField const& one : announced())
        {
            if (std::strcmp(field.name, one.name) == 0)
            {
                return;
            }
            known += std::string{known.empty() ? "" : ", "} + one.name;
        }
        refuse(std::string{"field "} + field.name + " is unknown: version 1 has " + known + "; remove it");
    }

    PluginField const* find(char const* name) const
    {
        for (int32_t i = 0; i < mCollection->nbFields; ++i)
        {
            if (std::strcmp(mCollection->fields[i].name, name) == 0)
            {
                return &mCollection->fields[i];
            }
        }
        return nullptr;
    }

    PluginFieldCollection const* mCollection;
};

KvDtype kvDtypeFrom(std::string const& name)
{
    for (KvDtypeName const& one : kKV_DTYPES)
    {
        if (one.name == name)
        {
            return one.dtype;
        }
    }
    refuse("kv_dtype '" + name + "': " + kKV_DTYPE_RULE + "; auto takes the type of the rows");
}

char const* nameOf(KvDtype dtype)
{
    for (KvDtypeName const& one : kKV_DTYPES)
    {
        if (one.dtype == dtype)
        {
            return one.name.data();
        }
    }
    return "";
}

void requireScale(char const* name, float value)
{
    require(std::isfinite(value) && value > 0.0F,
        std::string{name} + " " + std::to_string(value) + ": must be finite and > 0; pass a positive factor");
}

void validate(AttentionFields const& f)
{
    require(f.nSink >= 0, named("n_sink", f.nSink) + " < 0: sinks are a count; pass 0 for none");
    require(f.window >= 1, named("window", f.window) + " < 1: a query sees at least its own key; raise window");
    require(f.capacity >= f.window && f.capacity - f.window >= f.nSink,
        named("capacity", f.capacity) + " < " + named("n_sink", f.nSink) + " + " + named("window", f.window)
            + ": a ring holds its sinks and its window; pass n_sink + window + draft depth");
    require(f.numKvHeads >= 1,
        named("num_kv_heads", f.numKvHeads) + " < 1: attention has at least one KV head; raise num_kv_heads");
    require(f.numQHeads >= 1 && f.numQHeads % f.numKvHeads == 0,
        named("num_q_heads", f.numQHeads) + ": must be a positive multiple of " + named("num_kv_heads", f.numKvHeads)
            + "; pass the model's head counts");
    require(f.headDim >= 1, named("head_dim", f.headDim) + " < 1: a head has at least one element; raise head_dim");
    requireScale("scale", f.scale);
    requireScale("k_scale", f.kScale);
    requireScale("v_scale", f.vScale);
    require(f.kvDtype == KvDtype::kFP8 || (f.kScale == 1.0F && f.vScale == 1.0F),
        "k_scale " + std::to_string(f.kScale) + ", v_scale " + std::to_string(f.vScale) + " with kv_dtype "
            + nameOf(f.kvDtype) + ": only fp8 rings are scaled; leave the scales out or pass kv_dtype fp8");
    require(f.workspaceBytes >= 0,
        named(kWORKSPACE_FIELD, f.workspaceBytes) + " < 0: the engine is damaged; build it again");
    // Whatever the kernels do not run is refused here and not when the engine runs: the smallest launch must pass.
    cuda::WindowedShape smallest{};
    cuda::DType const rows = f.kvDtype == KvDtype::kFLOAT ? cuda::DType::kFloat32 : cuda::DType::kBFloat16;
    cuda::DType const cache = f.kvDtype == KvDtype::kFP8 ? cuda::DType::kFloat8E4M3 : rows;
    smallest.attention = cuda::AttentionShape{f.numQHeads, f.numKvHeads, f.headDim, rows, cache};
    smallest.n_requests = 1;
    smallest.n_rows = 1;
    smallest.n_queries = 1;
    smallest.n_lanes = 1;
    smallest.capacity = f.capacity;
    smallest.n_sink = f.nSink;
    smallest.window = f.window;
    std::string const problem = cuda::check(smallest);
    require(problem.empty(), problem);
}

} // namespace

PluginFieldCollection const& fieldNames()
{
    static PluginFieldCollection const collection{static_cast<int32_t>(announced().size()), announced().data()};
    return collection;
}

AttentionFields readFields(PluginFieldCollection const* collection, TensorRTPhase phase)
{
    FieldReader const reader{collection, phase};
    AttentionFields fields;
    fields.nSink = reader.integer("n_sink");
    fields.window = reader.integer("window");
    fields.capacity = reader.integer("capacity");
    fields.numQHeads = reader.smallInteger("num_q_heads");
    fields.numKvHeads = reader.smallInteger("num_kv_heads");
    fields.headDim = reader.smallInteger("head_dim");
    float const headDim = static_cast<float>(fields.headDim > 0 ? fields.headDim : 1);
    fields.scale = reader.number("scale", 1.0F / std::sqrt(headDim));
    fields.kvDtype = kvDtypeFrom(reader.text("kv_dtype", "auto"));
    fields.kScale = reader.number("k_scale", 1.0F);
    fields.vScale = reader.number("v_scale", 1.0F);
    if (phase == TensorRTPhase::kRUNTIME)
    {
        fields.workspaceBytes = reader.integer(kWORKSPACE_FIELD);
    }
    validate(fields);
    return fields;
}

PluginFieldCollection const* SerializedFields::store(AttentionFields const& fields)
{
    mFields = fields;
    char const* kvDtype = nameOf(fields.kvDtype);
    mEntries = {
        {"n_sink", &mFields.nSink, PluginFieldType::kINT64, 1},
        {"window", &mFields.window, PluginFieldType::kINT64, 1},
        {"capacity", &mFields.capacity, PluginFieldType::kINT64, 1},
        {"num_q_heads", &mFields.numQHeads, PluginFieldType::kINT32, 1},
        {"num_kv_heads", &mFields.numKvHeads, PluginFieldType::kINT32, 1},
        {"head_dim", &mFields.headDim, PluginFieldType::kINT32, 1},
        {"scale", &mFields.scale, PluginFieldType::kFLOAT32, 1},
        {"kv_dtype", kvDtype, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(kvDtype))},
        {"k_scale", &mFields.kScale, PluginFieldType::kFLOAT32, 1},
        {"v_scale", &mFields.vScale, PluginFieldType::kFLOAT32, 1},
        {kWORKSPACE_FIELD, &mFields.workspaceBytes, PluginFieldType::kINT64, 1},
    };
    mCollection = PluginFieldCollection{static_cast<int32_t>(mEntries.size()), mEntries.data()};
    return &mCollection;
}

std::string describe(AttentionFields const& f)
{
    return "n_sink=" + std::to_string(f.nSink) + " window=" + std::to_string(f.window)
        + " capacity=" + std::to_string(f.capacity) + " heads=" + std::to_string(f.numQHeads) + "/"
        + std::to_string(f.numKvHeads) + "x" + std::to_string(f.headDim) + " kv_dtype=" + nameOf(f.kvDtype);
}

} // namespace wmtp::plugin
