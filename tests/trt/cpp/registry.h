#pragma once

// The plugin registry of a TensorRT library that is loaded at run time. Its vtable changed in 11.0, so there is one
// declaration for each major; only the test calls it, the plugin never does.

#include <cstdint>

#include <dlfcn.h>

#include "checks.h"
#include "tensorrt.h"

namespace registry10
{
class Registry
{
public:
    virtual void unusedRegisterV2() = 0;
    virtual void unusedListV2() = 0;
    virtual void unusedGetV2() = 0;
    virtual ~Registry() = default; // two slots
    virtual void unusedSetErrorRecorder() = 0;
    virtual void unusedGetErrorRecorder() = 0;
    virtual void unusedDeregisterV2() = 0;
    virtual void unusedIsParentSearchEnabled() = 0;
    virtual void unusedSetParentSearchEnabled() = 0;
    virtual void* loadLibrary(char const* path) noexcept = 0;
    virtual void deregisterLibrary(void* handle) noexcept = 0;
    virtual void unusedRegister() = 0;
    virtual nvinfer1::IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
    virtual nvinfer1::IPluginCreatorInterface* getCreator(
        char const* name, char const* version, char const* pluginNamespace) noexcept = 0;
};
} // namespace registry10

namespace registry11
{
class Registry
{
public:
    virtual ~Registry() = default; // two slots
    virtual void unusedSetErrorRecorder() = 0;
    virtual void unusedGetErrorRecorder() = 0;
    virtual void unusedIsParentSearchEnabled() = 0;
    virtual void unusedSetParentSearchEnabled() = 0;
    virtual void* loadLibrary(char const* path) noexcept = 0;
    virtual void deregisterLibrary(void* handle) noexcept = 0;
    virtual void unusedRegister() = 0;
    virtual nvinfer1::IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
    virtual nvinfer1::IPluginCreatorInterface* getCreator(
        char const* name, char const* version, char const* pluginNamespace) noexcept = 0;
};
} // namespace registry11

//! One plugin library in the registry of one TensorRT library.
class LoadedPlugin
{
private:
    template <typename Call>
    auto call(Call&& callee) const
    {
        return mIs11 ? callee(*static_cast<registry11::Registry*>(mRegistry))
                     : callee(*static_cast<registry10::Registry*>(mRegistry));
    }

public:
    LoadedPlugin(char const* tensorrtPath, char const* pluginPath)
    {
        void* const tensorrt = dlopen(tensorrtPath, RTLD_NOW | RTLD_GLOBAL);
        if (tensorrt == nullptr)
        {
            std::printf("dlopen: %s\n", dlerror());
        }
        CHECK(tensorrt != nullptr);
        auto const version = reinterpret_cast<int32_t (*)()>(dlsym(tensorrt, "getInferLibVersion"));
        auto const registry = reinterpret_cast<void* (*)()>(dlsym(tensorrt, "getPluginRegistry"));
        CHECK(version != nullptr && registry != nullptr);
        mIs11 = version() >= 110000;
        mRegistry = registry();
        CHECK(mRegistry != nullptr);
        mHandle = call([&](auto& r) { return r.loadLibrary(pluginPath); });
        CHECK(mHandle != nullptr);
    }

    ~LoadedPlugin()
    {
        call([&](auto& r) { r.deregisterLibrary(mHandle); });
    }

    LoadedPlugin(LoadedPlugin const&) = delete;
    LoadedPlugin& operator=(LoadedPlugin const&) = delete;

    nvinfer1::IPluginCreatorV3One* creator() const
    {
        nvinfer1::IPluginCreatorInterface* const found =
            call([](auto& r) { return r.getCreator("WindowedDraftAttention", "1", "wmtp"); });
        CHECK(found != nullptr);
        CHECK(std::string{found->getInterfaceInfo().kind} == "PLUGIN CREATOR_V3ONE");
        return static_cast<nvinfer1::IPluginCreatorV3One*>(found);
    }

    bool lists(nvinfer1::IPluginCreatorInterface const* creator) const
    {
        int32_t count{};
        auto const* all = call([&](auto& r) { return r.getAllCreators(&count); });
        for (int32_t i = 0; i < count; ++i)
        {
            if (all[i] == creator)
            {
                return true;
            }
        }
        return false;
    }

private:
    void* mRegistry{};
    void* mHandle{};
    bool mIs11{};
};
