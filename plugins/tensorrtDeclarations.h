#pragma once

// Declarations of the part of TensorRT's plugin interface that this project implements, for builds without the SDK.
//
// Written from the documented interface of TensorRT 10.3 to 11.x. What the loader sees is binary: the order of the
// virtual functions, the layout of the structs, the values of the enumerators and the names of the namespaces. Each of
// these is fixed by tests/trt/cpp/abiTable.golden. Left out on purpose: loggers and the registry, whose vtables changed
// between 10.x and 11.0. Nothing here may be called on an object that TensorRT owns, except through the interfaces
// below; dimension expressions are passed on and never looked into.

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace nvinfer1
{

using AsciiChar = char;

enum class DataType : int32_t
{
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBOOL = 4,
    kUINT8 = 5,
    kFP8 = 6,
    kBF16 = 7,
    kINT64 = 8,
    kINT4 = 9,
};

enum class TensorFormat : int32_t
{
    kLINEAR = 0,
};

enum class APILanguage : int32_t
{
    kCPP = 0,
    kPYTHON = 1,
};

enum class TensorRTPhase : int32_t
{
    kBUILD = 0,
    kRUNTIME = 1,
};

enum class PluginCapabilityType : int32_t
{
    kCORE = 0,
    kBUILD = 1,
    kRUNTIME = 2,
};

enum class PluginFieldType : int32_t
{
    kFLOAT16 = 0,
    kFLOAT32 = 1,
    kFLOAT64 = 2,
    kINT8 = 3,
    kINT16 = 4,
    kINT32 = 5,
    kCHAR = 6,
    kDIMS = 7,
    kUNKNOWN = 8,
    kBF16 = 9,
    kINT64 = 10,
    kFP8 = 11,
};

class Dims64
{
public:
    static constexpr int32_t MAX_DIMS{8};
    int32_t nbDims; //!< -1 where the rank is unknown
    int64_t d[MAX_DIMS];
};

using Dims = Dims64;

//! `data` belongs to whoever made the field and outlives the call it is passed to.
class PluginField
{
public:
    AsciiChar const* name;
    void const* data;
    PluginFieldType type;
    int32_t length; //!< elements of `type` behind `data`

    PluginField(AsciiChar const* fieldName = nullptr, void const* fieldData = nullptr,
        PluginFieldType fieldType = PluginFieldType::kUNKNOWN, int32_t fieldLength = 0) noexcept
        : name{fieldName}
        , data{fieldData}
        , type{fieldType}
        , length{fieldLength}
    {
    }
};

struct PluginFieldCollection
{
    int32_t nbFields{};
    PluginField const* fields{};
};

struct PluginTensorDesc
{
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc
{
    PluginTensorDesc desc; //!< dimensions known only at run time are -1
    Dims min;
    Dims max;
    Dims opt;
};

class IDimensionExpr;
class IExprBuilder;
class ILoggerFinder;
class IPluginResourceContext;

class DimsExprs
{
public:
    int32_t nbDims;
    IDimensionExpr const* d[Dims::MAX_DIMS];
};

class InterfaceInfo
{
public:
    char const* kind;
    int32_t major;
    int32_t minor;
};

class IVersionedInterface
{
public:
    virtual APILanguage getAPILanguage() const noexcept
    {
        return APILanguage::kCPP;
    }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;

protected:
    IVersionedInterface() = default;
    IVersionedInterface(IVersionedInterface const&) = default;
    IVersionedInterface(IVersionedInterface&&) = default;
    IVersionedInterface& operator=(IVersionedInterface const&) & = default;
    IVersionedInterface& operator=(IVersionedInterface&&) & = default;
};

namespace v_1_0
{

class IPluginCapability : public IVersionedInterface
{
};

class IPluginCreatorInterface : public IVersionedInterface
{
};

class IPluginV3 : public IVersionedInterface
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return InterfaceInfo{"PLUGIN", 1, 0};
    }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return InterfaceInfo{"PLUGIN CREATOR_V3ONE", 1, 0};
    }
    virtual IPluginV3* createPlugin(
        AsciiChar const* name, PluginFieldCollection const* fc, TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return InterfaceInfo{"PLUGIN_V3ONE_CORE", 1, 0};
    }
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability
{
public:
    static constexpr int32_t kDEFAULT_FORMAT_COMBINATION_LIMIT = 100;

    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return InterfaceInfo{"PLUGIN_V3ONE_BUILD", 1, 0};
    }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
        DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(
        DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(
        int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept
    {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept
    {
        return 0;
    }
    virtual int32_t getNbTactics() noexcept
    {
        return 0;
    }
    virtual char const* getTimingCacheID() noexcept
    {
        return nullptr;
    }
    virtual int32_t getFormatCombinationLimit() noexcept
    {
        return kDEFAULT_FORMAT_COMBINATION_LIMIT;
    }
    virtual char const* getMetadataString() noexcept
    {
        return nullptr;
    }
};

class IPluginV3OneRuntime : public IPluginCapability
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return InterfaceInfo{"PLUGIN_V3ONE_RUNTIME", 1, 0};
    }
    virtual int32_t setTactic(int32_t) noexcept
    {
        return 0;
    }
    virtual int32_t onShapeChange(
        PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

} // namespace v_1_0

namespace v_2_0
{

class IPluginV3OneBuild : public v_1_0::IPluginV3OneBuild
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return InterfaceInfo{"PLUGIN_V3ONE_BUILD", 2, 0};
    }
    //! Index of the input whose buffer this output shares, or -1.
    virtual int32_t getAliasedInput(int32_t) noexcept
    {
        return -1;
    }
};

} // namespace v_2_0

using IPluginCapability = v_1_0::IPluginCapability;
using IPluginCreatorInterface = v_1_0::IPluginCreatorInterface;
using IPluginCreatorV3One = v_1_0::IPluginCreatorV3One;
using IPluginV3 = v_1_0::IPluginV3;
using IPluginV3OneBuild = v_1_0::IPluginV3OneBuild;
using IPluginV3OneBuildV2 = v_2_0::IPluginV3OneBuild;
using IPluginV3OneCore = v_1_0::IPluginV3OneCore;
using IPluginV3OneRuntime = v_1_0::IPluginV3OneRuntime;

} // namespace nvinfer1
