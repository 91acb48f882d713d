#include "tensorRules.h"

#include <array>
#include <limits>
#include <stdexcept>
#include <string>

namespace wmtp::plugin
{

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

namespace
{

constexpr std::array<char const*, input::kCOUNT_TREE> kINPUT_NAMES{
    "q", "k", "v", "row_offsets", "query_offsets", "start_positions", "lanes", "ring_k", "ring_v", "ancestor_mask"};
constexpr std::array<char const*, output::kCOUNT> kOUTPUT_NAMES{"out", "ring_k_out", "ring_v_out"};
constexpr std::array<int32_t, input::kCOUNT_TREE> kINPUT_RANKS{3, 3, 3, 1, 1, 1, 1, 4, 4, 2};

[[noreturn]] void refuse(std::string const& message)
{
    throw std::invalid_argument(message);
}

std::string text(Dims const& dims)
{
    std::string list;
    for (int32_t i = 0; i < dims.nbDims && i < Dims::MAX_DIMS; ++i)
    {
        list += (i == 0 ? "" : ", ") + std::to_string(dims.d[i]);
    }
    return "[" + list + "]";
}

std::string typeName(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT: return "float32";
    case DataType::kHALF: return "float16";
    case DataType::kBF16: return "bfloat16";
    case DataType::kFP8: return "fp8";
    case DataType::kINT32: return "int32";
    case DataType::kINT64: return "int64";
    default: return "DataType " + std::to_string(static_cast<int32_t>(type));
    }
}

bool isRowType(DataType type)
{
    return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

//! Type that the ring must have, given the rows'.
DataType ringType(KvDtype kvDtype, DataType rows)
{
    switch (kvDtype)
    {
    case KvDtype::kROWS: return rows;
    case KvDtype::kFLOAT: return DataType::kFLOAT;
    case KvDtype::kHALF: return DataType::kHALF;
    case KvDtype::kBF16: return DataType::kBF16;
    case KvDtype::kFP8: return DataType::kFP8;
    }
    return rows;
}

//! Rows are quantized on the way into an fp8 ring and only there; any other ring has the type of the rows.
bool isRowTypeFor(KvDtype kvDtype, DataType rows)
{
    return isRowType(rows) && (kvDtype == KvDtype::kFP8 || ringType(kvDtype, rows) == rows);
}

cuda::DType launcherType(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT: return cuda::DType::kFloat32;
    case DataType::kHALF: return cuda::DType::kFloat16;
    case DataType::kFP8: return cuda::DType::kFloat8E4M3;
    default: return cuda::DType::kBFloat16;
    }
}

//! Type that an input must have, given q's.
DataType inputType(AttentionFields const& fields, int32_t index, DataType rows)
{
    switch (index)
    {
    case input::kROW_OFFSETS:
    case input::kQUERY_OFFSETS:
    case input::kLANES:
    case input::kANCESTOR_MASK: return DataType::kINT32;
    case input::kSTART_POSITIONS: return DataType::kINT64;
    case input::kRING_K:
    case input::kRING_V: return ringType(fields.kvDtype, rows);
    default: return rows;
    }
}

DataType outputType(AttentionFields const& fields, int32_t index, DataType rows)
{
    return index == output::kOUT ? rows : ringType(fields.kvDtype, rows);
}

//! One tensor under inspection: its name for messages, and rules that throw.
class Tensor
{
public:
    Tensor(char const* name, PluginTensorDesc const& desc)
        : mName{name}
        , mDesc{desc}
    {
    }

    void requireRank(int32_t rank) const
    {
        if (mDesc.dims.nbDims != rank)
        {
            refuse(std::string{mName} + " has shape " + text(mDesc.dims) + ": must have rank " + std::to_string(rank)
                + "; reshape it");
        }
    }

    void requireType(DataType type) const
    {
        if (mDesc.type != type)
        {
            refuse(std::string{mName} + " is " + typeName(mDesc.type) + ": must be " + typeName(type)
                + "; cast it, or change kv_dtype");
        }
        if (mDesc.format != TensorFormat::kLINEAR)
        {
            refuse(std::string{mName} + " has TensorFormat " + std::to_string(static_cast<int32_t>(mDesc.format))
                + ": must be kLINEAR; allow the linear format");
        }
    }

    void requireDim(int32_t axis, int64_t size, char const* rule) const
    {
        if (mDesc.dims.d[axis] != size)
        {
            refuse(std::string{mName} + " has shape " + text(mDesc.dims) + ": dimension " + std::to_string(axis)
                + " must be " + rule + " = " + std::to_string(size) + "; change the tensor or the field");
        }
    }

    void requireSameShape(char const* otherName, Dims const& other) const
    {
        bool same = mDesc.dims.nbDims == other.nbDims;
        for (int32_t i = 0; same && i < other.nbDims; ++i)
        {
            same = mDesc.dims.d[i] == other.d[i];
        }
        if (!same)
        {
            refuse(std::string{mName} + " has shape " + text(mDesc.dims) + ": must equal the shape of " + otherName
                + ", " + text(other) + "; give both the same");
        }
    }

    int32_t size(int32_t axis) const
    {
        int64_t const value = mDesc.dims.d[axis];
        if (value < 0 || value > std::numeric_limits<int32_t>::max())
        {
            refuse(std::string{mName} + " has shape " + text(mDesc.dims) + ": dimension " + std::to_string(axis)
                + " must lie in [0, 2^31); lower the profile's maximum");
        }
        return static_cast<int32_t>(value);
    }

private:
    char const* mName;
    PluginTensorDesc const& mDesc;
};

void checkTypes(
    AttentionFields const& fields, PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out)
{
    DataType const rows = in[input::kQ].type;
    if (!isRowTypeFor(fields.kvDtype, rows))
    {
        refuse("q is " + typeName(rows) + " with " + describe(fields)
            + ": must be float32, float16 or bfloat16, and kv_dtype the same type or fp8; cast the rows");
    }
    for (int32_t i = 0; i < nbInputs; ++i)
    {
        Tensor{kINPUT_NAMES[i], in[i]}.requireType(inputType(fields, i, rows));
    }
    for (int32_t i = 0; i < output::kCOUNT; ++i)
    {
        Tensor{kOUTPUT_NAMES[i], out[i]}.requireType(outputType(fields, i, rows));
    }
}

void checkDims(AttentionFields const& fields, PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out)
{
    for (int32_t i = 0; i < nbInputs; ++i)
    {
        Tensor{kINPUT_NAMES[i], in[i]}.requireRank(kINPUT_RANKS[i]);
    }
    auto const at = [in](int32_t index) { return Tensor{kINPUT_NAMES[index], in[index]}; };
    at(input::kQ).requireDim(1, fields.numQHeads, "num_q_heads");
    at(input::kQ).requireDim(2, fields.headDim, "head_dim");
    at(input::kK).requireDim(1, fields.numKvHeads, "num_kv_heads");
    at(input::kK).requireDim(2, fields.headDim, "head_dim");
    at(input::kV).requireSameShape("k", in[input::kK].dims);
    int64_t const requests = in[input::kLANES].dims.d[0];
    at(input::kSTART_POSITIONS).requireDim(0, requests, "the size of lanes");
    at(input::kROW_OFFSETS).requireDim(0, requests + 1, "the size of lanes + 1");
    at(input::kQUERY_OFFSETS).requireDim(0, requests + 1, "the size of lanes + 1");
    at(input::kRING_K).requireDim(1, fields.capacity, "capacity");
    at(input::kRING_K).requireDim(2, fields.numKvHeads, "num_kv_heads");
    at(input::kRING_K).requireDim(3, fields.headDim, "head_dim");
    at(input::kRING_V).requireSameShape("ring_k", in[input::kRING_K].dims);
    if (requests > in[input::kRING_K].dims.d[0])
    {
        refuse("lanes has " + std::to_string(requests) + " requests and ring_k " + text(in[input::kRING_K].dims)
            + ": every request owns a lane; allocate more lanes or lower the batch");
    }
    if (nbInputs == input::kCOUNT_TREE)
    {
        at(input::kANCESTOR_MASK).requireDim(0, in[input::kQ].dims.d[0], "the rows of q");
    }
    // An output that shares its input's buffer and claims another shape would be read past its end; the builder does
    // not look at this.
    Tensor{outputName(output::kOUT), out[output::kOUT]}.requireSameShape("q", in[input::kQ].dims);
    for (int32_t i : {output::kRING_K, output::kRING_V})
    {
        Tensor{outputName(i), out[i]}.requireSameShape(inputName(aliasedInput(i)), in[aliasedInput(i)].dims);
    }
}

} // namespace

int32_t aliasedInput(int32_t outputIndex)
{
    switch (outputIndex)
    {
    case output::kRING_K: return input::kRING_K;
    case output::kRING_V: return input::kRING_V;
    default: return -1;
    }
}

char const* inputName(int32_t index)
{
    return kINPUT_NAMES.at(static_cast<size_t>(index));
}

char const* outputName(int32_t index)
{
    return kOUTPUT_NAMES.at(static_cast<size_t>(index));
}

void requireRanks(nvinfer1::DimsExprs const* inputs, int32_t nbInputs)
{
    for (int32_t i = 0; i < nbInputs; ++i)
    {
        if (inputs[i].nbDims != kINPUT_RANKS[i])
        {
            refuse(std::string{kINPUT_NAMES[i]} + " has rank " + std::to_string(inputs[i].nbDims) + ": must have rank "
                + std::to_string(kINPUT_RANKS[i]) + "; reshape it");
        }
    }
}

void requireCounts(int32_t nbInputs, int32_t nbOutputs)
{
    if (nbInputs != input::kCOUNT_CHAIN && nbInputs != input::kCOUNT_TREE)
    {
        refuse(std::to_string(nbInputs)
            + " inputs: must be 9 (q, k, v, row_offsets, query_offsets, start_positions, lanes, ring_k, ring_v) or 10 "
              "(with ancestor_mask); connect them in this order");
    }
    if (nbOutputs != output::kCOUNT)
    {
        refuse(std::to_string(nbOutputs)
            + " outputs: must be 3 (out, ring_k_out, ring_v_out); declare the rings' outputs even where nobody reads "
              "them");
    }
}

bool supportsTensor(
    AttentionFields const& fields, int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs)
{
    PluginTensorDesc const& tensor = inOut[pos].desc;
    DataType const rows = inOut[input::kQ].desc.type;
    if (tensor.format != TensorFormat::kLINEAR || !isRowTypeFor(fields.kvDtype, rows))
    {
        return false;
    }
    return tensor.type == (pos < nbInputs ? inputType(fields, pos, rows) : outputType(fields, pos - nbInputs, rows));
}

cuda::WindowedShape launchShape(AttentionFields const& fields, PluginTensorDesc const* in, int32_t nbInputs,
    PluginTensorDesc const* out, int32_t nbOutputs)
{
    requireCounts(nbInputs, nbOutputs);
    checkTypes(fields, in, nbInputs, out);
    checkDims(fields, in, nbInputs, out);
    auto const size = [in](int32_t index, int32_t axis) { return Tensor{kINPUT_NAMES[index], in[index]}.size(axis); };
    cuda::WindowedShape shape{};
    shape.attention = cuda::AttentionShape{fields.numQHeads, fields.numKvHeads, fields.headDim,
        launcherType(in[input::kQ].type), launcherType(in[input::kRING_K].type)};
    shape.n_requests = size(input::kLANES, 0);
    shape.n_rows = size(input::kK, 0);
    shape.n_queries = size(input::kQ, 0);
    shape.n_lanes = size(input::kRING_K, 0);
    shape.capacity = fields.capacity;
    shape.n_sink = fields.nSink;
    shape.window = fields.window;
    shape.mask_words = nbInputs == input::kCOUNT_TREE ? size(input::kANCESTOR_MASK, 1) : 0;
    std::string const problem = cuda::check(shape);
    if (!problem.empty())
    {
        refuse(problem);
    }
    return shape;
}

} // namespace wmtp::plugin
