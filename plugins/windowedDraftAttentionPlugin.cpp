#include "windowedDraftAttentionPlugin.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "guarded.h"
#include "tensorRules.h"
#include "workspace.h"

namespace wmtp::plugin
{

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginCapability;
using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;

namespace
{

constexpr int32_t kSUCCESS{0};
constexpr int32_t kFAILURE{1};

//! The tensors of the profile's largest shape.
std::vector<PluginTensorDesc> largest(DynamicPluginTensorDesc const* tensors, int32_t count)
{
    std::vector<PluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i)
    {
        descs.push_back(tensors[i].desc);
        descs.back().dims = tensors[i].max;
    }
    return descs;
}

int64_t workspaceOfProfile(AttentionFields const& fields, DynamicPluginTensorDesc const* in, int32_t nbInputs,
    DynamicPluginTensorDesc const* out, int32_t nbOutputs)
{
    requireCounts(nbInputs, nbOutputs);
    return workspaceFor(
        launchShape(fields, largest(in, nbInputs).data(), nbInputs, largest(out, nbOutputs).data(), nbOutputs));
}

void requireSuccess(cudaError_t error, char const* what)
{
    if (error != cudaSuccess)
    {
        throw std::runtime_error(std::string{what} + " failed: " + cudaGetErrorString(error));
    }
}

int32_t smCount()
{
    int32_t nSms{};
    requireSuccess(cuda::sm_count(&nSms), "asking the device for its multiprocessors");
    return nSms;
}

void requireInPlace(void const* const* inputs, void* const* outputs, int32_t outputIndex)
{
    int32_t const inputIndex = aliasedInput(outputIndex);
    if (inputs[inputIndex] != outputs[outputIndex])
    {
        throw std::runtime_error(std::string{outputName(outputIndex)} + " is not the buffer of " + inputName(inputIndex)
            + ": the ring is updated in place; bind both names to one address and build with the preview feature for "
              "aliased plugin I/O");
    }
}

void requireUsable(cuda::WindowedShape const& shape, cuda::Plan const& plan, cuda::WindowedBuffers const& buffers)
{
    std::string problem = cuda::check(shape, buffers);
    if (problem.empty() && plan.workspace_bytes > 0 && buffers.workspace == nullptr)
    {
        problem = "workspace is null: this shape needs " + std::to_string(plan.workspace_bytes)
            + " bytes; raise the builder's workspace limit";
    }
    if (!problem.empty())
    {
        throw std::invalid_argument(problem);
    }
}

cuda::WindowedBuffers unpack(AttentionFields const& fields, cuda::WindowedShape const& shape, void const* const* inputs,
    void* const* outputs, void* workspace)
{
    cuda::WindowedBuffers buffers{};
    buffers.q = inputs[input::kQ];
    buffers.k = inputs[input::kK];
    buffers.v = inputs[input::kV];
    buffers.ring_k = outputs[output::kRING_K];
    buffers.ring_v = outputs[output::kRING_V];
    buffers.row_offsets = static_cast<int32_t const*>(inputs[input::kROW_OFFSETS]);
    buffers.query_offsets = static_cast<int32_t const*>(inputs[input::kQUERY_OFFSETS]);
    buffers.start_positions = static_cast<int64_t const*>(inputs[input::kSTART_POSITIONS]);
    buffers.lanes = static_cast<int32_t const*>(inputs[input::kLANES]);
    if (shape.mask_words > 0)
    {
        buffers.ancestor_mask = static_cast<uint32_t const*>(inputs[input::kANCESTOR_MASK]);
    }
    buffers.out = outputs[output::kOUT];
    buffers.workspace = workspace;
    buffers.softmax_scale = fields.scale;
    buffers.k_scale = fields.kScale;
    buffers.v_scale = fields.vScale;
    return buffers;
}

} // namespace

WindowedDraftAttentionPlugin::WindowedDraftAttentionPlugin(AttentionFields const& fields)
    : mFields{fields}
    , mMetadata{describe(fields)}
{
}

IPluginCapability* WindowedDraftAttentionPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    // Each capability is another base: only static_cast finds the right one.
    return guarded("getCapabilityInterface", static_cast<IPluginCapability*>(nullptr),
        [&]() -> IPluginCapability*
        {
            switch (type)
            {
            case PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
            case PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
            case PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
            }
            throw std::invalid_argument("PluginCapabilityType " + std::to_string(static_cast<int32_t>(type))
                + ": must be kCORE, kBUILD or kRUNTIME; this version has no other");
        });
}

IPluginV3* WindowedDraftAttentionPlugin::clone() noexcept
{
    return guarded("clone", static_cast<IPluginV3*>(nullptr),
        [&]() -> IPluginV3* { return new WindowedDraftAttentionPlugin{mFields}; });
}

nvinfer1::AsciiChar const* WindowedDraftAttentionPlugin::getPluginName() const noexcept
{
    return guarded("getPluginName", "", [] { return kPLUGIN_NAME; });
}

nvinfer1::AsciiChar const* WindowedDraftAttentionPlugin::getPluginVersion() const noexcept
{
    return guarded("getPluginVersion", "", [] { return kPLUGIN_VERSION; });
}

nvinfer1::AsciiChar const* WindowedDraftAttentionPlugin::getPluginNamespace() const noexcept
{
    return guarded("getPluginNamespace", "", [] { return kPLUGIN_NAMESPACE; });
}

int32_t WindowedDraftAttentionPlugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    return guarded("configurePlugin", kFAILURE,
        [&]
        {
            // Once per profile; the engine reserves the largest, and its runtime plugin must know how much that was.
            mFields.workspaceBytes =
                std::max(mFields.workspaceBytes, workspaceOfProfile(mFields, in, nbInputs, out, nbOutputs));
            return kSUCCESS;
        });
}

int32_t WindowedDraftAttentionPlugin::getOutputDataTypes(
    DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept
{
    return guarded("getOutputDataTypes", kFAILURE,
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            outputTypes[output::kOUT] = inputTypes[input::kQ];
            outputTypes[output::kRING_K] = inputTypes[input::kRING_K];
            outputTypes[output::kRING_V] = inputTypes[input::kRING_V];
            return kSUCCESS;
        });
}

int32_t WindowedDraftAttentionPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs,
    DimsExprs const* /*shapeInputs*/, int32_t /*nbShapeInputs*/, DimsExprs* outputs, int32_t nbOutputs,
    nvinfer1::IExprBuilder& /*exprBuilder*/) noexcept
{
    return guarded("getOutputShapes", kFAILURE,
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            requireRanks(inputs, nbInputs);
            outputs[output::kOUT] = inputs[input::kQ];
            outputs[output::kRING_K] = inputs[input::kRING_K];
            outputs[output::kRING_V] = inputs[input::kRING_V];
            return kSUCCESS;
        });
}

bool WindowedDraftAttentionPlugin::supportsFormatCombination(
    int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept
{
    return guarded("supportsFormatCombination", false,
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            return supportsTensor(mFields, pos, inOut, nbInputs);
        });
}

int32_t WindowedDraftAttentionPlugin::getNbOutputs() const noexcept
{
    return guarded("getNbOutputs", -1, [] { return output::kCOUNT; });
}

size_t WindowedDraftAttentionPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
    DynamicPluginTensorDesc const* outputs, int32_t nbOutputs) const noexcept
{
    return guarded("getWorkspaceSize", size_t{0},
        [&] { return static_cast<size_t>(workspaceOfProfile(mFields, inputs, nbInputs, outputs, nbOutputs)); });
}

int32_t WindowedDraftAttentionPlugin::getValidTactics(int32_t* /*tactics*/, int32_t /*nbTactics*/) noexcept
{
    return guarded("getValidTactics", kFAILURE, [] { return kSUCCESS; });
}

int32_t WindowedDraftAttentionPlugin::getNbTactics() noexcept
{
    // The launcher's plan chooses; there is nothing for the builder to time.
    return guarded("getNbTactics", 0, [] { return 0; });
}

char const* WindowedDraftAttentionPlugin::getTimingCacheID() noexcept
{
    return guarded("getTimingCacheID", static_cast<char const*>(nullptr), [&] { return mMetadata.c_str(); });
}

char const* WindowedDraftAttentionPlugin::getMetadataString() noexcept
{
    return guarded("getMetadataString", static_cast<char const*>(nullptr), [&] { return mMetadata.c_str(); });
}

int32_t WindowedDraftAttentionPlugin::getAliasedInput(int32_t outputIndex) noexcept
{
    return guarded("getAliasedInput", -1, [&] { return aliasedInput(outputIndex); });
}

int32_t WindowedDraftAttentionPlugin::setTactic(int32_t tactic) noexcept
{
    return guarded("setTactic", kFAILURE,
        [&]
        {
            if (tactic != 0)
            {
                throw std::invalid_argument("tactic " + std::to_string(tactic)
                    + ": must be 0, the default, because the plugin announces none; build the engine again");
            }
            return kSUCCESS;
        });
}

int32_t WindowedDraftAttentionPlugin::onShapeChange(
    PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    return guarded("onShapeChange", kFAILURE,
        [&]
        {
            mHasPlan = false;
            mShape = launchShape(mFields, in, nbInputs, out, nbOutputs);
            mPlan = planWithin(mShape, smCount(), mFields.workspaceBytes);
            mHasPlan = true;
            return kSUCCESS;
        });
}

int32_t WindowedDraftAttentionPlugin::enqueue(PluginTensorDesc const* /*inputDesc*/,
    PluginTensorDesc const* /*outputDesc*/, void const* const* inputs, void* const* outputs, void* workspace,
    cudaStream_t stream) noexcept
{
    return guarded("enqueue", kFAILURE,
        [&]
        {
            if (!mHasPlan)
            {
                throw std::logic_error("no shape: onShapeChange must succeed first; check its message above");
            }
            requireInPlace(inputs, outputs, output::kRING_K);
            requireInPlace(inputs, outputs, output::kRING_V);
            cuda::WindowedBuffers const buffers = unpack(mFields, mShape, inputs, outputs, workspace);
            requireUsable(mShape, mPlan, buffers);
            requireSuccess(cuda::run(mShape, mPlan, buffers, stream), "launching the kernels");
            return kSUCCESS;
        });
}

IPluginV3* WindowedDraftAttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext* /*context*/) noexcept
{
    return guarded("attachToContext", static_cast<IPluginV3*>(nullptr),
        [&]() -> IPluginV3*
        {
            IPluginV3* const attached = clone();
            if (attached == nullptr)
            {
                // TensorRT follows the pointer without looking: an explained end is better than a null one.
                report("attachToContext", "out of memory: a context needs its own plugin; free host memory");
                std::abort();
            }
            return attached;
        });
}

PluginFieldCollection const* WindowedDraftAttentionPlugin::getFieldsToSerialize() noexcept
{
    return guarded("getFieldsToSerialize", static_cast<PluginFieldCollection const*>(nullptr),
        [&] { return mSerialized.store(mFields); });
}

} // namespace wmtp::plugin
