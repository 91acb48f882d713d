#include "windowedDraftAttentionCreator.h"

#include "guarded.h"
#include "windowedDraftAttentionPlugin.h"

namespace wmtp::plugin
{

using nvinfer1::IPluginV3;
using nvinfer1::PluginFieldCollection;

IPluginV3* WindowedDraftAttentionCreator::createPlugin(
    nvinfer1::AsciiChar const* /*name*/, PluginFieldCollection const* fc, nvinfer1::TensorRTPhase phase) noexcept
{
    return guarded("createPlugin", static_cast<IPluginV3*>(nullptr),
        [&]() -> IPluginV3* { return new WindowedDraftAttentionPlugin{readFields(fc, phase)}; });
}

PluginFieldCollection const* WindowedDraftAttentionCreator::getFieldNames() noexcept
{
    return guarded("getFieldNames", static_cast<PluginFieldCollection const*>(nullptr), [] { return &fieldNames(); });
}

nvinfer1::AsciiChar const* WindowedDraftAttentionCreator::getPluginName() const noexcept
{
    return guarded("creator.getPluginName", "", [] { return kPLUGIN_NAME; });
}

nvinfer1::AsciiChar const* WindowedDraftAttentionCreator::getPluginVersion() const noexcept
{
    return guarded("creator.getPluginVersion", "", [] { return kPLUGIN_VERSION; });
}

nvinfer1::AsciiChar const* WindowedDraftAttentionCreator::getPluginNamespace() const noexcept
{
    return guarded("creator.getPluginNamespace", "", [] { return kPLUGIN_NAMESPACE; });
}

} // namespace wmtp::plugin
