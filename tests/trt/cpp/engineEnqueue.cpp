// For a machine with a GPU and TensorRT: trt_engine_enqueue <plugin library>. Builds an engine with the plugin node,
// serializes and deserializes it, runs 40 steps with rollback over several wraps of the ring, half of them as replays
// of a captured CUDA graph, and compares every answer and both rings with the CPU kernels.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "checks.h"
#include "wmtp/attention.hpp"

#if WMTP_TENSORRT_SDK
#include <NvInfer.h>
#else
#include "builderDeclarations.h"
#endif

using namespace nvinfer1;

namespace
{

constexpr int32_t kREQUESTS{3};
constexpr int32_t kROWS{5};    //!< appended by each request in each step
constexpr int32_t kQUERIES{2}; //!< answered of them
constexpr int32_t kLANES{4};
constexpr int32_t kQ_HEADS{4};
constexpr int32_t kKV_HEADS{2};
constexpr int32_t kHEAD_DIM{64};
constexpr int64_t kN_SINK{4};
constexpr int64_t kWINDOW{300}; //!< more than one tile of keys, so that the plan splits
constexpr int64_t kCAPACITY{320};
constexpr float kSCALE{0.125F};
constexpr int kSTEPS{40};

class Logger : public ILogger
{
public:
    void log(Severity severity, AsciiChar const* message) noexcept override
    {
        if (severity <= Severity::kWARNING)
        {
            std::fprintf(stderr, "[TensorRT] %s\n", message);
        }
    }
};

Dims dims(std::vector<int64_t> const& sizes)
{
    Dims made{};
    made.nbDims = static_cast<int32_t>(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i)
    {
        made.d[i] = sizes[i];
    }
    return made;
}

void requireCuda(cudaError_t error)
{
    if (error != cudaSuccess)
    {
        std::printf("CUDA: %s\n", cudaGetErrorString(error));
    }
    CHECK(error == cudaSuccess);
}

//! Device memory.
class DeviceBuffer
{
public:
    explicit DeviceBuffer(size_t bytes)
        : mBytes{bytes}
    {
        requireCuda(cudaMalloc(&mData, bytes));
        requireCuda(cudaMemset(mData, 0, bytes));
    }
    ~DeviceBuffer()
    {
        cudaFree(mData);
    }
    DeviceBuffer(DeviceBuffer const&) = delete;
    DeviceBuffer& operator=(DeviceBuffer const&) = delete;

    template <typename T>
    void upload(std::vector<T> const& values)
    {
        CHECK(values.size() * sizeof(T) == mBytes);
        requireCuda(cudaMemcpy(mData, values.data(), mBytes, cudaMemcpyHostToDevice));
    }

    std::vector<float> download() const
    {
        std::vector<float> values(mBytes / sizeof(float));
        requireCuda(cudaMemcpy(values.data(), mData, mBytes, cudaMemcpyDeviceToHost));
        return values;
    }

    void* data() const
    {
        return mData;
    }

private:
    void* mData{};
    size_t mBytes;
};

struct Input
{
    char const* name;
    DataType type;
    std::vector<int64_t> sizes;
    bool dynamic; //!< in its first axis
};

std::vector<Input> inputs()
{
    return {{"q", DataType::kFLOAT, {kREQUESTS * kQUERIES, kQ_HEADS, kHEAD_DIM}, true},
        {"k", DataType::kFLOAT, {kREQUESTS * kROWS, kKV_HEADS, kHEAD_DIM}, true},
        {"v", DataType::kFLOAT, {kREQUESTS * kROWS, kKV_HEADS, kHEAD_DIM}, true},
        {"row_offsets", DataType::kINT32, {kREQUESTS + 1}, true},
        {"query_offsets", DataType::kINT32, {kREQUESTS + 1}, true},
        {"start_positions", DataType::kINT64, {kREQUESTS}, true}, {"lanes", DataType::kINT32, {kREQUESTS}, true},
        {"ring_k", DataType::kFLOAT, {kLANES, kCAPACITY, kKV_HEADS, kHEAD_DIM}, false},
        {"ring_v", DataType::kFLOAT, {kLANES, kCAPACITY, kKV_HEADS, kHEAD_DIM}, false}};
}

std::unique_ptr<IPluginV3> makePlugin(char const* library)
{
    CHECK(getPluginRegistry()->loadLibrary(library) != nullptr);
    auto* const creator =
        static_cast<IPluginCreatorV3One*>(getPluginRegistry()->getCreator("WindowedDraftAttention", "1", "wmtp"));
    CHECK(creator != nullptr);
    std::vector<PluginField> const fields{{"n_sink", &kN_SINK, PluginFieldType::kINT64, 1},
        {"window", &kWINDOW, PluginFieldType::kINT64, 1}, {"capacity", &kCAPACITY, PluginFieldType::kINT64, 1},
        {"num_q_heads", &kQ_HEADS, PluginFieldType::kINT32, 1},
        {"num_kv_heads", &kKV_HEADS, PluginFieldType::kINT32, 1}, {"head_dim", &kHEAD_DIM, PluginFieldType::kINT32, 1},
        {"scale", &kSCALE, PluginFieldType::kFLOAT32, 1}};
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    IPluginV3* const plugin = creator->createPlugin("attention", &collection, TensorRTPhase::kBUILD);
    CHECK(plugin != nullptr);
    return std::unique_ptr<IPluginV3>{plugin};
}

std::unique_ptr<IHostMemory> buildEngine(ILogger& logger, IPluginV3& plugin)
{
    std::unique_ptr<IBuilder> const builder{createInferBuilder(logger)};
    CHECK(builder != nullptr);
    uint32_t const flags = 1U << static_cast<uint32_t>(NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
    std::unique_ptr<INetworkDefinition> const network{builder->createNetworkV2(flags)};
    std::unique_ptr<IBuilderConfig> const config{builder->createBuilderConfig()};
    IOptimizationProfile* const profile = builder->createOptimizationProfile();
    std::vector<ITensor*> tensors;
    for (Input const& input : inputs())
    {
        std::vector<int64_t> sizes = input.sizes;
        if (input.dynamic)
        {
            std::vector<int64_t> smallest = sizes;
            smallest[0] = input.sizes[0] == kREQUESTS + 1 ? 2 : 1;
            profile->setDimensions(input.name, OptProfileSelector::kMIN, dims(smallest));
            profile->setDimensions(input.name, OptProfileSelector::kOPT, dims(sizes));
            profile->setDimensions(input.name, OptProfileSelector::kMAX, dims(sizes));
            sizes[0] = -1;
        }
        tensors.push_back(network->addInput(input.name, input.type, dims(sizes)));
        CHECK(tensors.back() != nullptr);
    }
    IPluginV3Layer* const layer =
        network->addPluginV3(tensors.data(), static_cast<int32_t>(tensors.size()), nullptr, 0, plugin);
    CHECK(layer != nullptr);
    char const* const outputs[]{"out", "ring_k_out", "ring_v_out"};
    for (int32_t i = 0; i < 3; ++i)
    {
        layer->getOutput(i)->setName(outputs[i]);
        network->markOutput(*layer->getOutput(i));
    }
    config->setPreviewFeature(PreviewFeature::kALIASED_PLUGIN_IO_10_03, true);
    config->addOptimizationProfile(profile);
    std::unique_ptr<IHostMemory> engine{builder->buildSerializedNetwork(*network, *config)};
    CHECK(engine != nullptr);
    return engine;
}

std::vector<float> randomFloats(std::mt19937& random, size_t count)
{
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values)
    {
        value = normal(random);
    }
    return values;
}

void requireClose(std::vector<float> const& got, std::vector<float> const& expected, float tolerance)
{
    CHECK(got.size() == expected.size());
    for (size_t i = 0; i < got.size(); ++i)
    {
        CHECK(std::abs(got[i] - expected[i]) <= tolerance);
    }
}

//! The same step on the CPU, in place on host rings.
struct Reference
{
    std::vector<float> ringK = std::vector<float>(kLANES * kCAPACITY * kKV_HEADS * kHEAD_DIM);
    std::vector<float> ringV = ringK;

    std::vector<float> step(std::vector<float> const& q, std::vector<float> const& k, std::vector<float> const& v,
        std::vector<int32_t> const& rowOffsets, std::vector<int32_t> const& queryOffsets,
        std::vector<int64_t> const& starts, std::vector<int32_t> const& lanes)
    {
        std::vector<float> out(q.size());
        auto const type = wmtp::DType::kFloat32;
        wmtp::windowed_draft_attention({q.data(), type},
            {{k.data(), type}, {v.data(), type}, {rowOffsets.data(), kREQUESTS, rowOffsets.back()}, starts.data()},
            {queryOffsets.data(), kREQUESTS, queryOffsets.back()}, {kQ_HEADS, kKV_HEADS, kHEAD_DIM},
            {{ringK.data(), type}, {ringV.data(), type}, kLANES, kCAPACITY, kN_SINK}, lanes.data(), kWINDOW, kSCALE,
            {nullptr, 0}, {out.data(), type}, 1);
        return out;
    }
};

} // namespace

int main(int argc, char** argv)
{
    if (argc != 2)
    {
        std::printf("usage: %s <plugin library>\n", argv[0]);
        return 2;
    }
    int devices{};
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
    {
        std::printf("skipped: no GPU\n");
        return 77;
    }
    Logger logger;
    std::unique_ptr<IPluginV3> const plugin = makePlugin(argv[1]);
    std::unique_ptr<IHostMemory> const stored = buildEngine(logger, *plugin);
    std::unique_ptr<IRuntime> const runtime{createInferRuntime(logger)};
    CHECK(runtime != nullptr);
    std::unique_ptr<ICudaEngine> const engine{runtime->deserializeCudaEngine(stored->data(), stored->size())};
    CHECK(engine != nullptr);
    std::unique_ptr<IExecutionContext> const context{engine->createExecutionContext()};
    CHECK(context != nullptr);

    std::map<std::string, std::unique_ptr<DeviceBuffer>> buffers;
    for (Input const& input : inputs())
    {
        size_t bytes = input.type == DataType::kINT64 ? 8 : 4;
        for (int64_t size : input.sizes)
        {
            bytes *= static_cast<size_t>(size);
        }
        buffers[input.name] = std::make_unique<DeviceBuffer>(bytes);
        CHECK(context->setInputShape(input.name, dims(input.sizes)));
        CHECK(context->setTensorAddress(input.name, buffers[input.name]->data()));
    }
    buffers["out"] = std::make_unique<DeviceBuffer>(size_t{4} * kREQUESTS * kQUERIES * kQ_HEADS * kHEAD_DIM);
    CHECK(context->setTensorAddress("out", buffers["out"]->data()));
    CHECK(context->setTensorAddress("ring_k_out", buffers["ring_k"]->data()));
    CHECK(context->setTensorAddress("ring_v_out", buffers["ring_v"]->data()));

    std::vector<int32_t> const rowOffsets{0, 5, 10, 15}, queryOffsets{0, 2, 4, 6}, lanes{2, 0, 3};
    buffers["row_offsets"]->upload(rowOffsets);
    buffers["query_offsets"]->upload(queryOffsets);
    buffers["lanes"]->upload(lanes);
    cudaStream_t stream{};
    requireCuda(cudaStreamCreate(&stream));
    cudaGraphExec_t graph{};
    Reference reference;
    std::mt19937 random{5};
    std::vector<int64_t> starts{0, 290, 1000};
    for (int step = 0; step < kSTEPS; ++step)
    {
        auto const q = randomFloats(random, kREQUESTS * kQUERIES * kQ_HEADS * kHEAD_DIM);
        auto const k = randomFloats(random, kREQUESTS * kROWS * kKV_HEADS * kHEAD_DIM);
        auto const v = randomFloats(random, kREQUESTS * kROWS * kKV_HEADS * kHEAD_DIM);
        buffers["q"]->upload(q);
        buffers["k"]->upload(k);
        buffers["v"]->upload(v);
        buffers["start_positions"]->upload(starts);
        if (step == kSTEPS / 2)
        {
            cudaGraph_t captured{};
            requireCuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            CHECK(context->enqueueV3(stream));
            requireCuda(cudaStreamEndCapture(stream, &captured));
            requireCuda(cudaGraphInstantiate(&graph, captured, 0));
            requireCuda(cudaGraphDestroy(captured));
        }
        if (graph != nullptr)
        {
            requireCuda(cudaGraphLaunch(graph, stream));
        }
        else
        {
            CHECK(context->enqueueV3(stream));
        }
        requireCuda(cudaStreamSynchronize(stream));
        auto const expected = reference.step(q, k, v, rowOffsets, queryOffsets, starts, lanes);
        requireClose(buffers["out"]->download(), expected, 1e-4F);
        requireClose(buffers["ring_k"]->download(), reference.ringK, 0.0F);
        requireClose(buffers["ring_v"]->download(), reference.ringV, 0.0F);
        for (int64_t& start : starts)
        {
            start += 1 + static_cast<int64_t>(random() % kROWS);
        }
    }
    requireCuda(cudaGraphExecDestroy(graph));
    requireCuda(cudaStreamDestroy(stream));
    std::printf("ok: %d steps, half of them replayed from a CUDA graph\n", kSTEPS);
    return 0;
}
