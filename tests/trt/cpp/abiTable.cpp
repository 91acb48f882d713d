// Prints what a loader of the plugin depends on: sizes, offsets, enumerators, and for each virtual function its vtable
// slot and signature. The same program is compiled against our declarations and against NVIDIA's headers.

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <typeinfo>

#include "tensorrt.h"

using namespace nvinfer1;

namespace
{

//! Slot of a virtual member function: the Itanium C++ ABI stores 1 + its byte offset in the vtable.
template <typename Member>
long slotOf(Member member)
{
    std::ptrdiff_t words[2];
    static_assert(sizeof(member) == sizeof(words), "not the Itanium C++ ABI");
    std::memcpy(words, &member, sizeof(words));
    return (words[0] & 1) != 0 ? static_cast<long>((words[0] - 1) / static_cast<std::ptrdiff_t>(sizeof(void*))) : -1;
}

template <typename T>
void size(char const* name)
{
    std::printf("size %s %zu align %zu\n", name, sizeof(T), alignof(T));
}

template <typename Enum>
void enumerator(char const* name, Enum value)
{
    std::printf("enum %s %d of %zu bytes, %s\n", name, static_cast<int>(value), sizeof(Enum), typeid(Enum).name());
}

} // namespace

#define SIZE(type) size<type>(#type)
#define OFFSET(type, member)                                                                                           \
    std::printf(                                                                                                       \
        "offset %s::%s %zu, %s\n", #type, #member, offsetof(type, member), typeid(decltype(type::member)).name())
#define ENUM(value) enumerator(#value, value)
#define SLOT(type, method)                                                                                             \
    std::printf("slot %s::%s %ld, %s\n", #type, #method, slotOf(&type::method), typeid(decltype(&type::method)).name())

int main()
{
    SIZE(Dims);
    OFFSET(Dims, nbDims);
    OFFSET(Dims, d);
    SIZE(DimsExprs);
    OFFSET(DimsExprs, nbDims);
    OFFSET(DimsExprs, d);
    SIZE(PluginField);
    OFFSET(PluginField, name);
    OFFSET(PluginField, data);
    OFFSET(PluginField, type);
    OFFSET(PluginField, length);
    SIZE(PluginFieldCollection);
    OFFSET(PluginFieldCollection, nbFields);
    OFFSET(PluginFieldCollection, fields);
    SIZE(PluginTensorDesc);
    OFFSET(PluginTensorDesc, dims);
    OFFSET(PluginTensorDesc, type);
    OFFSET(PluginTensorDesc, format);
    OFFSET(PluginTensorDesc, scale);
    SIZE(DynamicPluginTensorDesc);
    OFFSET(DynamicPluginTensorDesc, desc);
    OFFSET(DynamicPluginTensorDesc, min);
    OFFSET(DynamicPluginTensorDesc, max);
    OFFSET(DynamicPluginTensorDesc, opt);
    SIZE(InterfaceInfo);
    OFFSET(InterfaceInfo, kind);
    OFFSET(InterfaceInfo, major);
    OFFSET(InterfaceInfo, minor);
    SIZE(IVersionedInterface);
    SIZE(IPluginCapability);
    SIZE(IPluginCreatorInterface);
    SIZE(IPluginV3);
    SIZE(IPluginV3OneCore);
    SIZE(IPluginV3OneBuildV2);
    SIZE(IPluginV3OneRuntime);
    SIZE(IPluginCreatorV3One);

    ENUM(DataType::kFLOAT);
    ENUM(DataType::kHALF);
    ENUM(DataType::kINT8);
    ENUM(DataType::kINT32);
    ENUM(DataType::kBOOL);
    ENUM(DataType::kUINT8);
    ENUM(DataType::kFP8);
    ENUM(DataType::kBF16);
    ENUM(DataType::kINT64);
    ENUM(DataType::kINT4);
    ENUM(TensorFormat::kLINEAR);
    ENUM(APILanguage::kCPP);
    ENUM(APILanguage::kPYTHON);
    ENUM(TensorRTPhase::kBUILD);
    ENUM(TensorRTPhase::kRUNTIME);
    ENUM(PluginCapabilityType::kCORE);
    ENUM(PluginCapabilityType::kBUILD);
    ENUM(PluginCapabilityType::kRUNTIME);
    ENUM(PluginFieldType::kFLOAT16);
    ENUM(PluginFieldType::kFLOAT32);
    ENUM(PluginFieldType::kFLOAT64);
    ENUM(PluginFieldType::kINT8);
    ENUM(PluginFieldType::kINT16);
    ENUM(PluginFieldType::kINT32);
    ENUM(PluginFieldType::kCHAR);
    ENUM(PluginFieldType::kDIMS);
    ENUM(PluginFieldType::kUNKNOWN);
    ENUM(PluginFieldType::kBF16);
    ENUM(PluginFieldType::kINT64);
    ENUM(PluginFieldType::kFP8);

    SLOT(IVersionedInterface, getAPILanguage);
    SLOT(IVersionedInterface, getInterfaceInfo);
    SLOT(IPluginV3, getCapabilityInterface);
    SLOT(IPluginV3, clone);
    SLOT(IPluginV3OneCore, getPluginName);
    SLOT(IPluginV3OneCore, getPluginVersion);
    SLOT(IPluginV3OneCore, getPluginNamespace);
    SLOT(IPluginV3OneBuildV2, configurePlugin);
    SLOT(IPluginV3OneBuildV2, getOutputDataTypes);
    SLOT(IPluginV3OneBuildV2, getOutputShapes);
    SLOT(IPluginV3OneBuildV2, supportsFormatCombination);
    SLOT(IPluginV3OneBuildV2, getNbOutputs);
    SLOT(IPluginV3OneBuildV2, getWorkspaceSize);
    SLOT(IPluginV3OneBuildV2, getValidTactics);
    SLOT(IPluginV3OneBuildV2, getNbTactics);
    SLOT(IPluginV3OneBuildV2, getTimingCacheID);
    SLOT(IPluginV3OneBuildV2, getFormatCombinationLimit);
    SLOT(IPluginV3OneBuildV2, getMetadataString);
    SLOT(IPluginV3OneBuildV2, getAliasedInput);
    SLOT(IPluginV3OneRuntime, setTactic);
    SLOT(IPluginV3OneRuntime, onShapeChange);
    SLOT(IPluginV3OneRuntime, enqueue);
    SLOT(IPluginV3OneRuntime, attachToContext);
    SLOT(IPluginV3OneRuntime, getFieldsToSerialize);
    SLOT(IPluginCreatorV3One, createPlugin);
    SLOT(IPluginCreatorV3One, getFieldNames);
    SLOT(IPluginCreatorV3One, getPluginName);
    SLOT(IPluginCreatorV3One, getPluginVersion);
    SLOT(IPluginCreatorV3One, getPluginNamespace);
    return 0;
}
