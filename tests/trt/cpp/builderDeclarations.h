#pragma once

// Just enough of TensorRT's builder and runtime for engineEnqueue.cpp to be compiled where no SDK is. Nothing here can
// be linked or run: the layouts and vtables of these classes are not ours to state.

#include <cstddef>
#include <cstdint>

#include "tensorrt.h"

namespace nvinfer1
{

enum class PreviewFeature : int32_t
{
    kALIASED_PLUGIN_IO_10_03,
};

enum class OptProfileSelector : int32_t
{
    kMIN,
    kOPT,
    kMAX,
};

enum class NetworkDefinitionCreationFlag : int32_t
{
    kSTRONGLY_TYPED,
};

class ILogger
{
public:
    enum class Severity : int32_t
    {
        kINTERNAL_ERROR,
        kERROR,
        kWARNING,
        kINFO,
        kVERBOSE,
    };
    virtual void log(Severity severity, AsciiChar const* message) noexcept = 0;
    virtual ~ILogger() = default;
};

class ITensor
{
public:
    void setName(char const* name) noexcept;
};

class IPluginV3Layer
{
public:
    ITensor* getOutput(int32_t index) const noexcept;
};

class INetworkDefinition
{
public:
    virtual ~INetworkDefinition() = default;
    ITensor* addInput(char const* name, DataType type, Dims const& dimensions) noexcept;
    IPluginV3Layer* addPluginV3(ITensor* const* inputs, int32_t nbInputs, ITensor* const* shapeInputs,
        int32_t nbShapeInputs, IPluginV3& plugin) noexcept;
    void markOutput(ITensor& tensor) noexcept;
};

class IOptimizationProfile
{
public:
    bool setDimensions(char const* inputName, OptProfileSelector select, Dims const& dims) noexcept;
};

class IBuilderConfig
{
public:
    virtual ~IBuilderConfig() = default;
    void setPreviewFeature(PreviewFeature feature, bool enable) noexcept;
    int32_t addOptimizationProfile(IOptimizationProfile const* profile) noexcept;
};

class IHostMemory
{
public:
    virtual ~IHostMemory() = default;
    void* data() const noexcept;
    std::size_t size() const noexcept;
};

class IBuilder
{
public:
    virtual ~IBuilder() = default;
    INetworkDefinition* createNetworkV2(uint32_t flags) noexcept;
    IBuilderConfig* createBuilderConfig() noexcept;
    IOptimizationProfile* createOptimizationProfile() noexcept;
    IHostMemory* buildSerializedNetwork(INetworkDefinition& network, IBuilderConfig& config) noexcept;
};

class IExecutionContext
{
public:
    virtual ~IExecutionContext() = default;
    bool setInputShape(char const* tensorName, Dims const& dims) noexcept;
    bool setTensorAddress(char const* tensorName, void* data) noexcept;
    bool enqueueV3(cudaStream_t stream) noexcept;
};

class ICudaEngine
{
public:
    virtual ~ICudaEngine() = default;
    IExecutionContext* createExecutionContext() noexcept;
};

class IRuntime
{
public:
    virtual ~IRuntime() = default;
    ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept;
};

class IPluginRegistry
{
public:
    void* loadLibrary(AsciiChar const* pluginPath) noexcept;
    IPluginCreatorInterface* getCreator(
        AsciiChar const* name, AsciiChar const* version, AsciiChar const* pluginNamespace) noexcept;
};

IBuilder* createInferBuilder(ILogger& logger) noexcept;
IRuntime* createInferRuntime(ILogger& logger) noexcept;

} // namespace nvinfer1

extern "C" nvinfer1::IPluginRegistry* getPluginRegistry() noexcept;
