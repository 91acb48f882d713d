// The two symbols that TensorRT's loader looks for. The creator is announced here and nowhere else: registering it from
// a constructor would call the registry, whose vtable changed in TensorRT 11.

#include "tensorrt.h"
#include "windowedDraftAttentionCreator.h"

#define WMTP_EXPORT __attribute__((visibility("default")))

//! Kept for the loader, which refuses libraries without it. The finder is not used: see guarded.h.
extern "C" WMTP_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* /*finder*/) {}

extern "C" WMTP_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators)
{
    static wmtp::plugin::WindowedDraftAttentionCreator creator;
    static nvinfer1::IPluginCreatorInterface* const creators[]{&creator};
    nbCreators = 1;
    return creators;
}
