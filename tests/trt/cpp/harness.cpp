// Drives the plugin through a real TensorRT library: harness <TensorRT library> <plugin library> <scenario>.
// Exits with 0 when every check of the scenario holds. Scenarios on host memory need the plugin that is linked with
// hostLauncher.cpp.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "checks.h"
#include "registry.h"
#include "tensorrt.h"

using namespace nvinfer1;

namespace
{

// --- Fields ----------------------------------------------------------------------------------------------------------

//! A field that owns its data.
struct Field
{
    std::string name;
    PluginFieldType type;
    int32_t length;
    std::vector<char> data;
};

template <typename T>
Field field(char const* name, PluginFieldType type, T value)
{
    Field made{name, type, 1, std::vector<char>(sizeof(T))};
    std::memcpy(made.data.data(), &value, sizeof(T));
    return made;
}

Field integer(char const* name, int64_t value)
{
    return field(name, PluginFieldType::kINT64, value);
}

Field number(char const* name, float value)
{
    return field(name, PluginFieldType::kFLOAT32, value);
}

Field text(char const* name, std::string const& value)
{
    return Field{name, PluginFieldType::kCHAR, static_cast<int32_t>(value.size()), {value.begin(), value.end()}};
}

class Fields
{
public:
    Fields()
        : mFields{integer("n_sink", 4), integer("window", 12), integer("capacity", 20), integer("num_q_heads", 4),
              integer("num_kv_heads", 2), integer("head_dim", 64), number("scale", 0.125F)}
    {
    }

    Fields& set(Field const& added)
    {
        remove(added.name);
        mFields.push_back(added);
        return *this;
    }

    Fields& add(Field const& added)
    {
        mFields.push_back(added);
        return *this;
    }

    Fields& remove(std::string const& name)
    {
        for (size_t i = 0; i < mFields.size(); ++i)
        {
            if (mFields[i].name == name)
            {
                mFields.erase(mFields.begin() + static_cast<long>(i));
                return *this;
            }
        }
        return *this;
    }

    IPluginV3* create(IPluginCreatorV3One& creator, TensorRTPhase phase = TensorRTPhase::kBUILD) const
    {
        std::vector<PluginField> fields;
        for (Field const& one : mFields)
        {
            fields.emplace_back(one.name.c_str(), one.data.data(), one.type, one.length);
        }
        PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
        return creator.createPlugin("node", &collection, phase);
    }

    static size_t bytesOf(PluginField const& entry)
    {
        size_t const size = entry.type == PluginFieldType::kCHAR ? 1 : entry.type == PluginFieldType::kINT64 ? 8 : 4;
        return size * static_cast<size_t>(entry.length);
    }

    //! A deep copy of what a plugin stores in an engine.
    static Fields copyOf(PluginFieldCollection const& collection)
    {
        Fields copy;
        copy.mFields.clear();
        for (int32_t i = 0; i < collection.nbFields; ++i)
        {
            PluginField const& entry = collection.fields[i];
            auto const* bytes = static_cast<char const*>(entry.data);
            copy.mFields.push_back(Field{entry.name, entry.type, entry.length, {bytes, bytes + bytesOf(entry)}});
        }
        return copy;
    }

    bool operator==(Fields const& other) const
    {
        bool same = mFields.size() == other.mFields.size();
        for (size_t i = 0; same && i < mFields.size(); ++i)
        {
            Field const &a = mFields[i], &b = other.mFields[i];
            same = a.name == b.name && a.type == b.type && a.length == b.length && a.data == b.data;
        }
        return same;
    }

    int64_t valueOf(std::string const& name) const
    {
        for (Field const& one : mFields)
        {
            if (one.name == name)
            {
                int64_t value{};
                std::memcpy(&value, one.data.data(), one.data.size());
                return value;
            }
        }
        return -1;
    }

private:
    std::vector<Field> mFields;
};

// --- Capabilities ----------------------------------------------------------------------------------------------------

struct Plugin
{
    std::unique_ptr<IPluginV3> object;
    IPluginV3OneCore* core;
    IPluginV3OneBuildV2* build;
    IPluginV3OneRuntime* runtime;
};

Plugin wrap(IPluginV3* object)
{
    CHECK(object != nullptr);
    Plugin plugin{std::unique_ptr<IPluginV3>{object}, nullptr, nullptr, nullptr};
    plugin.core = static_cast<IPluginV3OneCore*>(object->getCapabilityInterface(PluginCapabilityType::kCORE));
    plugin.build = static_cast<IPluginV3OneBuildV2*>(object->getCapabilityInterface(PluginCapabilityType::kBUILD));
    plugin.runtime = static_cast<IPluginV3OneRuntime*>(object->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    CHECK(plugin.core != nullptr && plugin.build != nullptr && plugin.runtime != nullptr);
    return plugin;
}

void checkInterface(IVersionedInterface const& object, std::string const& kind, int32_t major)
{
    InterfaceInfo const info = object.getInterfaceInfo();
    CHECK(info.kind == kind);
    CHECK(info.major == major && info.minor == 0);
    CHECK(object.getAPILanguage() == APILanguage::kCPP);
}

// --- Tensors ---------------------------------------------------------------------------------------------------------

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

PluginTensorDesc desc(std::vector<int64_t> const& sizes, DataType type)
{
    return PluginTensorDesc{dims(sizes), type, TensorFormat::kLINEAR, 1.0F};
}

//! The tensors of a step: 3 requests of 5 rows, the last 2 of each answered, 4 lanes. Matches the default Fields.
struct Tensors
{
    std::vector<PluginTensorDesc> in;
    std::vector<PluginTensorDesc> out;

    explicit Tensors(DataType rows = DataType::kFLOAT, DataType ring = DataType::kFLOAT, bool tree = false,
        int64_t requests = 3, int64_t nRows = 15, int64_t nQueries = 6)
        : in{desc({nQueries, 4, 64}, rows), desc({nRows, 2, 64}, rows), desc({nRows, 2, 64}, rows),
              desc({requests + 1}, DataType::kINT32), desc({requests + 1}, DataType::kINT32),
              desc({requests}, DataType::kINT64), desc({requests}, DataType::kINT32), desc({4, 20, 2, 64}, ring),
              desc({4, 20, 2, 64}, ring)}
    {
        if (tree)
        {
            in.push_back(desc({nQueries, 1}, DataType::kINT32));
        }
        out = {in[0], in[7], in[8]};
    }

    Tensors& withCapacity(int64_t capacity)
    {
        for (PluginTensorDesc* ring : {&in[7], &in[8], &out[1], &out[2]})
        {
            ring->dims.d[1] = capacity;
        }
        return *this;
    }

    int32_t nbInputs() const
    {
        return static_cast<int32_t>(in.size());
    }

    int32_t nbOutputs() const
    {
        return static_cast<int32_t>(out.size());
    }

    //! As the builder sees them: any smaller shape may come.
    static std::vector<DynamicPluginTensorDesc> dynamic(std::vector<PluginTensorDesc> const& tensors)
    {
        std::vector<DynamicPluginTensorDesc> made;
        for (PluginTensorDesc const& tensor : tensors)
        {
            made.push_back(DynamicPluginTensorDesc{tensor, tensor.dims, tensor.dims, tensor.dims});
            made.back().desc.dims.d[0] = -1;
            made.back().min.d[0] = 1;
        }
        return made;
    }

    int32_t onShapeChange(Plugin const& plugin) const
    {
        return plugin.runtime->onShapeChange(in.data(), nbInputs(), out.data(), nbOutputs());
    }

    int32_t configure(Plugin const& plugin) const
    {
        auto const dynamicIn = dynamic(in);
        auto const dynamicOut = dynamic(out);
        return plugin.build->configurePlugin(dynamicIn.data(), nbInputs(), dynamicOut.data(), nbOutputs());
    }

    size_t workspace(Plugin const& plugin) const
    {
        auto const dynamicIn = dynamic(in);
        auto const dynamicOut = dynamic(out);
        return plugin.build->getWorkspaceSize(dynamicIn.data(), nbInputs(), dynamicOut.data(), nbOutputs());
    }

    //! Whether the plugin accepts the tensors one after the other, the way the builder asks.
    bool supported(Plugin const& plugin) const
    {
        std::vector<PluginTensorDesc> all = in;
        all.insert(all.end(), out.begin(), out.end());
        auto const dynamicAll = dynamic(all);
        for (int32_t pos = 0; pos < static_cast<int32_t>(all.size()); ++pos)
        {
            if (!plugin.build->supportsFormatCombination(pos, dynamicAll.data(), nbInputs(), nbOutputs()))
            {
                return false;
            }
        }
        return true;
    }
};

// --- Scenarios -------------------------------------------------------------------------------------------------------

void listed(LoadedPlugin const& loaded)
{
    IPluginCreatorV3One* const creator = loaded.creator();
    CHECK(loaded.lists(creator));
    checkInterface(*creator, "PLUGIN CREATOR_V3ONE", 1);
    CHECK(std::string{creator->getPluginName()} == "WindowedDraftAttention");
    CHECK(std::string{creator->getPluginVersion()} == "1");
    CHECK(std::string{creator->getPluginNamespace()} == "wmtp");
    std::set<std::string> names;
    PluginFieldCollection const* fields = creator->getFieldNames();
    for (int32_t i = 0; i < fields->nbFields; ++i)
    {
        names.insert(fields->fields[i].name);
    }
    std::set<std::string> const expected{"n_sink", "window", "capacity", "num_q_heads", "num_kv_heads", "head_dim",
        "scale", "kv_dtype", "k_scale", "v_scale"};
    CHECK(names == expected);
}

void goodFields(LoadedPlugin const& loaded)
{
    IPluginCreatorV3One& creator = *loaded.creator();
    std::vector<Fields> const good{
        Fields{},
        Fields{}.remove("scale"),
        Fields{}.set(integer("n_sink", 0)).set(integer("capacity", 12)),
        Fields{}.set(field("window", PluginFieldType::kINT32, int32_t{12})),
        Fields{}.set(text("kv_dtype", "auto")),
        Fields{}.set(text("kv_dtype", std::string("fp8\0", 4))),
        Fields{}.set(text("kv_dtype", "fp8")).set(number("k_scale", 0.5F)).set(number("v_scale", 2.0F)),
        Fields{}.set(integer("num_kv_heads", 4)),
        Fields{}.set(integer("head_dim", 256)),
    };
    for (Fields const& fields : good)
    {
        Plugin const plugin = wrap(fields.create(creator));
        CHECK(plugin.runtime->getFieldsToSerialize() != nullptr);
    }
    // Default of the softmax scale: 1 / sqrt(head_dim).
    Plugin const plain = wrap(Fields{}.remove("scale").create(creator));
    Plugin const spelled = wrap(Fields{}.create(creator));
    CHECK(Fields::copyOf(*plain.runtime->getFieldsToSerialize())
        == Fields::copyOf(*spelled.runtime->getFieldsToSerialize()));
}

void badFields(LoadedPlugin const& loaded)
{
    IPluginCreatorV3One& creator = *loaded.creator();
    struct Case
    {
        Fields fields;
        char const* value;
        char const* remedy;
    };
    float const nan = std::nanf("");
    std::vector<Case> const cases{
        {Fields{}.set(integer("n_sink", -1)), "n_sink -1 < 0", "pass 0 for none"},
        {Fields{}.set(integer("window", 0)), "window 0 < 1", "raise window"},
        {Fields{}.set(integer("window", INT64_MAX)), "window 9223372036854775807", "draft depth"},
        {Fields{}.set(integer("capacity", 15)), "capacity 15 < n_sink 4 + window 12", "n_sink + window + draft depth"},
        {Fields{}.set(integer("capacity", INT64_MIN)), "capacity -9223372036854775808", "draft depth"},
        {Fields{}.set(integer("num_kv_heads", 0)), "num_kv_heads 0", "raise num_kv_heads"},
        {Fields{}.set(integer("num_q_heads", 5)), "num_q_heads 5", "pass the model's head counts"},
        {Fields{}.set(integer("num_q_heads", int64_t{1} << 40)), "num_q_heads 1099511627776", "32 bits"},
        {Fields{}.set(integer("head_dim", 0)), "head_dim 0", "raise head_dim"},
        {Fields{}.set(integer("head_dim", 257)), "head_dim 257", "pad the heads"},
        {Fields{}.set(number("scale", 0.0F)), "scale 0.0", "pass a positive factor"},
        {Fields{}.set(number("scale", nan)), "scale nan", "pass a positive factor"},
        {Fields{}.set(integer("scale", 1)), "field scale", "pass one float"},
        {Fields{}.set(text("kv_dtype", "int8")), "kv_dtype 'int8'", "auto takes the type of the rows"},
        {Fields{}.set(integer("kv_dtype", 3)), "field kv_dtype", "pass a string"},
        {Fields{}.set(number("k_scale", 0.5F)), "k_scale 0.5", "pass kv_dtype fp8"},
        {Fields{}.remove("window"), "field window is missing", "pass an integer"},
        {Fields{}.set(number("window", 12.0F)), "field window has PluginFieldType 1", "pass an integer"},
        {Fields{}.add(integer("window", 12)), "field window is given twice", "pass it once"},
        {Fields{}.add(integer("windows", 12)), "field windows is unknown", "remove it"},
        {Fields{}.add(integer("workspace_bytes", 0)), "field workspace_bytes is unknown", "remove it"},
        {Fields{}.set(Field{"window", PluginFieldType::kINT64, 0, {}}), "field window has 0 elements", "one integer"},
    };
    for (Case const& one : cases)
    {
        IPluginV3* plugin{};
        std::string const message = capturedStderr([&] { plugin = one.fields.create(creator); });
        CHECK(plugin == nullptr);
        CHECK_CONTAINS(message, "[wmtp] WindowedDraftAttention::createPlugin: ");
        CHECK_CONTAINS(message, one.value);
        CHECK_CONTAINS(message, one.remedy);
    }
    CHECK_CONTAINS(
        capturedStderr([&] { CHECK(creator.createPlugin("node", nullptr, TensorRTPhase::kBUILD) == nullptr); }),
        "field collection is null");
    CHECK_CONTAINS(capturedStderr([&] { CHECK(Fields{}.create(creator, TensorRTPhase::kRUNTIME) == nullptr); }),
        "field workspace_bytes is missing");
}

void interfaces(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    checkInterface(*plugin.object, "PLUGIN", 1);
    checkInterface(*plugin.core, "PLUGIN_V3ONE_CORE", 1);
    checkInterface(*plugin.build, "PLUGIN_V3ONE_BUILD", 2);
    checkInterface(*plugin.runtime, "PLUGIN_V3ONE_RUNTIME", 1);
    CHECK(std::string{plugin.core->getPluginName()} == "WindowedDraftAttention");
    CHECK(std::string{plugin.core->getPluginVersion()} == "1");
    CHECK(std::string{plugin.core->getPluginNamespace()} == "wmtp");
    CHECK(plugin.build->getNbOutputs() == 3);
    CHECK(plugin.build->getFormatCombinationLimit() >= 1);
    CHECK_CONTAINS(plugin.build->getMetadataString(), "window=12");
    CHECK_CONTAINS(plugin.build->getTimingCacheID(), "capacity=20");
    auto const unknown = static_cast<PluginCapabilityType>(7);
    CHECK_CONTAINS(
        capturedStderr([&] { CHECK(plugin.object->getCapabilityInterface(unknown) == nullptr); }), "7: must be kCORE");
}

void aliases(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    CHECK(plugin.build->getAliasedInput(0) == -1);
    CHECK(plugin.build->getAliasedInput(1) == 7);
    CHECK(plugin.build->getAliasedInput(2) == 8);
    CHECK(plugin.build->getAliasedInput(3) == -1);
    CHECK(plugin.build->getAliasedInput(-1) == -1);
}

//! The builder accepts a tactic that is announced twice, so it is looked at here.
void tactics(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    int32_t const count = plugin.build->getNbTactics();
    CHECK(count >= 0);
    std::vector<int32_t> announced(static_cast<size_t>(count) + 1, -7);
    CHECK(plugin.build->getValidTactics(announced.data(), count) == 0);
    CHECK(announced.back() == -7);
    announced.pop_back();
    CHECK(std::set<int32_t>(announced.begin(), announced.end()).size() == announced.size());
    for (int32_t tactic : announced)
    {
        CHECK(tactic > 0);
        CHECK(plugin.runtime->setTactic(tactic) == 0);
    }
    CHECK(plugin.runtime->setTactic(0) == 0);
    CHECK_CONTAINS(capturedStderr([&] { CHECK(plugin.runtime->setTactic(3) != 0); }), "tactic 3: must be 0");
}

void outputs(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    // Expressions belong to the builder; the plugin may only pass them on.
    alignas(16) char expressions[10][8][16]{};
    alignas(16) char builderStorage[64]{};
    auto& builder = *reinterpret_cast<IExprBuilder*>(builderStorage);
    Tensors const tensors{DataType::kHALF, DataType::kHALF, true};
    std::vector<DimsExprs> in(tensors.in.size());
    std::vector<DataType> types;
    for (size_t i = 0; i < in.size(); ++i)
    {
        in[i].nbDims = tensors.in[i].dims.nbDims;
        types.push_back(tensors.in[i].type);
        for (size_t axis = 0; axis < 8; ++axis)
        {
            in[i].d[axis] = reinterpret_cast<IDimensionExpr const*>(expressions[i][axis]);
        }
    }
    DimsExprs out[3]{};
    CHECK(plugin.build->getOutputShapes(in.data(), 10, nullptr, 0, out, 3, builder) == 0);
    int32_t const sources[3]{0, 7, 8};
    for (int32_t i = 0; i < 3; ++i)
    {
        DimsExprs const& source = in[static_cast<size_t>(sources[i])];
        CHECK(out[i].nbDims == source.nbDims);
        CHECK(std::memcmp(out[i].d, source.d, sizeof(void*) * static_cast<size_t>(source.nbDims)) == 0);
    }
    DataType outTypes[3];
    CHECK(plugin.build->getOutputDataTypes(outTypes, 3, types.data(), 10) == 0);
    CHECK(outTypes[0] == DataType::kHALF && outTypes[1] == DataType::kHALF && outTypes[2] == DataType::kHALF);

    auto const refusal = [&](int32_t nbInputs, int32_t nbOutputs)
    {
        return capturedStderr([&]
            { CHECK(plugin.build->getOutputShapes(in.data(), nbInputs, nullptr, 0, out, nbOutputs, builder) != 0); });
    };
    CHECK_CONTAINS(refusal(8, 3), "8 inputs: must be 9");
    CHECK_CONTAINS(refusal(9, 1), "1 outputs: must be 3");
    in[7].nbDims = 3;
    CHECK_CONTAINS(refusal(9, 3), "ring_k has rank 3: must have rank 4");
}

void formats(LoadedPlugin const& loaded)
{
    IPluginCreatorV3One& creator = *loaded.creator();
    DataType const rowTypes[]{DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
    std::map<std::string, DataType> const named{{"float32", DataType::kFLOAT}, {"float16", DataType::kHALF},
        {"bfloat16", DataType::kBF16}, {"fp8", DataType::kFP8}};
    DataType const all[]{DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kFP8, DataType::kINT8,
        DataType::kINT32, DataType::kINT64, DataType::kBOOL};
    for (bool tree : {false, true})
    {
        for (auto const& [name, ring] : named)
        {
            Plugin const plugin = wrap(Fields{}.set(text("kv_dtype", name)).create(creator));
            for (DataType rows : all)
            {
                bool const isRow = std::find(std::begin(rowTypes), std::end(rowTypes), rows) != std::end(rowTypes);
                for (DataType other : all)
                {
                    bool const expected = isRow && other == ring && (ring == DataType::kFP8 || rows == ring);
                    CHECK(Tensors(rows, other, tree).supported(plugin) == expected);
                }
            }
        }
        Plugin const plugin = wrap(Fields{}.create(creator));
        for (DataType rows : rowTypes)
        {
            CHECK(Tensors(rows, rows, tree).supported(plugin));
            Tensors const good{rows, rows, tree};
            for (size_t i = 0; i < good.in.size(); ++i)
            {
                Tensors wrongType = good;
                wrongType.in[i].type = DataType::kBOOL;
                CHECK(!wrongType.supported(plugin));
                Tensors wrongFormat = good;
                wrongFormat.in[i].format = static_cast<TensorFormat>(1);
                CHECK(!wrongFormat.supported(plugin));
            }
            for (size_t i = 0; i < good.out.size(); ++i)
            {
                Tensors wrongType = good;
                wrongType.out[i].type = DataType::kINT32;
                CHECK(!wrongType.supported(plugin));
            }
        }
    }
}

//! Every rule about shapes, at build time and at run time alike.
void shapeRules(LoadedPlugin const& loaded)
{
    IPluginCreatorV3One& creator = *loaded.creator();
    struct Case
    {
        std::function<void(Tensors&)> spoil;
        char const* message;
    };
    std::vector<Case> const cases{
        {[](Tensors& t) { t.in[0].dims.d[1] = 8; }, "q has shape [6, 8, 64]: dimension 1 must be num_q_heads = 4"},
        {[](Tensors& t) { t.in[0].dims.d[2] = 32; }, "q has shape [6, 4, 32]: dimension 2 must be head_dim = 64"},
        {[](Tensors& t) { t.in[0].dims.nbDims = 2; }, "q has shape [6, 4]: must have rank 3"},
        {[](Tensors& t) { t.in[1].dims.d[1] = 4; }, "k has shape [15, 4, 64]: dimension 1 must be num_kv_heads = 2"},
        {[](Tensors& t) { t.in[2].dims.d[0] = 14; }, "v has shape [14, 2, 64]: must equal the shape of k"},
        {[](Tensors& t) { t.in[3].dims.d[0] = 3; },
            "row_offsets has shape [3]: dimension 0 must be the size of lanes + 1"},
        {[](Tensors& t) { t.in[4].dims.d[0] = 5; }, "query_offsets has shape [5]"},
        {[](Tensors& t) { t.in[5].dims.d[0] = 2; },
            "start_positions has shape [2]: dimension 0 must be the size of lanes"},
        {[](Tensors& t) { t.in[7].dims.d[1] = 19; },
            "ring_k has shape [4, 19, 2, 64]: dimension 1 must be capacity = 20"},
        {[](Tensors& t) { t.in[7].dims.d[2] = 1; },
            "ring_k has shape [4, 20, 1, 64]: dimension 2 must be num_kv_heads"},
        {[](Tensors& t) { t.in[8].dims.d[0] = 5; }, "ring_v has shape [5, 20, 2, 64]: must equal the shape of ring_k"},
        {[](Tensors& t) { t.in[7].dims.d[0] = t.in[8].dims.d[0] = t.out[1].dims.d[0] = t.out[2].dims.d[0] = 2; },
            "lanes has 3 requests and ring_k [2, 20, 2, 64]: every request owns a lane"},
        {[](Tensors& t) { t.in[9].dims.d[0] = 5; },
            "ancestor_mask has shape [5, 1]: dimension 0 must be the rows of q"},
        {[](Tensors& t) { t.in[0].dims.d[0] = t.out[0].dims.d[0] = t.in[9].dims.d[0] = 16; },
            "n_queries 16 > n_rows 15"},
        {[](Tensors& t) { t.in[1].dims.d[0] = t.in[2].dims.d[0] = int64_t{1} << 31; }, "must lie in [0, 2^31)"},
        {[](Tensors& t) { t.in[0].type = DataType::kINT8; }, "q is DataType 2"},
        {[](Tensors& t) { t.in[5].type = DataType::kINT32; }, "start_positions is int32: must be int64"},
        {[](Tensors& t) { t.in[8].type = DataType::kHALF; }, "ring_v is float16: must be float32"},
        {[](Tensors& t) { t.in[8].format = static_cast<TensorFormat>(1); },
            "ring_v has TensorFormat 1: must be kLINEAR"},
        {[](Tensors& t) { t.out[0].dims.d[0] = 5; }, "out has shape [5, 4, 64]: must equal the shape of q"},
        // An aliased output of another shape or type: the builder lets the shape pass.
        {[](Tensors& t) { t.out[1].dims.d[1] = 24; },
            "ring_k_out has shape [4, 24, 2, 64]: must equal the shape of ring_k"},
        {[](Tensors& t) { t.out[2].dims.nbDims = 3; },
            "ring_v_out has shape [4, 20, 2]: must equal the shape of ring_v"},
        {[](Tensors& t) { t.out[2].type = DataType::kBF16; }, "ring_v_out is bfloat16: must be float32"},
        {[](Tensors& t) { t.out.pop_back(); }, "2 outputs: must be 3"},
        {[](Tensors& t) { t.in.push_back(t.in[0]); }, "11 inputs: must be 9"},
    };
    for (Case const& one : cases)
    {
        Plugin const plugin = wrap(Fields{}.create(creator));
        Tensors tensors{DataType::kFLOAT, DataType::kFLOAT, true};
        one.spoil(tensors);
        std::string message = capturedStderr([&] { CHECK(tensors.onShapeChange(plugin) != 0); });
        CHECK_CONTAINS(message, "[wmtp] WindowedDraftAttention::onShapeChange: ");
        CHECK_CONTAINS(message, one.message);
        CHECK_CONTAINS(message, "; ");
        message = capturedStderr([&] { CHECK(tensors.configure(plugin) != 0); });
        CHECK_CONTAINS(message, "[wmtp] WindowedDraftAttention::configurePlugin: ");
        CHECK_CONTAINS(message, one.message);
    }
    // One request with more query rows than the ring spares: the newest row would overwrite what the first sees.
    Plugin const plugin = wrap(Fields{}.create(creator));
    Tensors const wide{DataType::kFLOAT, DataType::kFLOAT, false, 1, 8, 6};
    CHECK_CONTAINS(capturedStderr([&] { CHECK(wide.onShapeChange(plugin) != 0); }), "the ring spares 4 slots");
}

void workspace(LoadedPlugin const& loaded)
{
    // A window of many tiles of keys, which the plan splits.
    Fields const fields =
        Fields{}.set(text("kv_dtype", "fp8")).set(integer("window", 4000)).set(integer("capacity", 4096));
    Plugin const plugin = wrap(fields.create(*loaded.creator()));
    Tensors const tensors = Tensors{DataType::kBF16, DataType::kFP8}.withCapacity(4096);
    CHECK(tensors.configure(plugin) == 0);
    size_t const reserved = tensors.workspace(plugin);
    CHECK(reserved > 0);
    Fields const stored = Fields::copyOf(*plugin.runtime->getFieldsToSerialize());
    CHECK(stored.valueOf("workspace_bytes") == static_cast<int64_t>(reserved));
    // Two profiles: the engine reserves the larger, whichever came first.
    Tensors const small = Tensors{DataType::kBF16, DataType::kFP8, false, 1, 1, 1}.withCapacity(4096);
    CHECK(small.configure(plugin) == 0);
    CHECK(Fields::copyOf(*plugin.runtime->getFieldsToSerialize()) == stored);
    CHECK(small.workspace(plugin) <= reserved);
}

void roundTrips(LoadedPlugin const& loaded)
{
    IPluginCreatorV3One& creator = *loaded.creator();
    Fields const spelled = Fields{}
                               .set(text("kv_dtype", "fp8"))
                               .set(number("k_scale", 0.03F))
                               .set(number("v_scale", 0.07F))
                               .set(number("scale", 0.1F));
    Tensors const tensors{DataType::kBF16, DataType::kFP8};
    auto built = std::make_unique<Plugin>(wrap(spelled.create(creator)));
    CHECK(tensors.configure(*built) == 0);
    Fields const stored = Fields::copyOf(*built->runtime->getFieldsToSerialize());
    auto cloned = std::make_unique<Plugin>(wrap(built->object->clone()));
    built.reset();
    CHECK(Fields::copyOf(*cloned->runtime->getFieldsToSerialize()) == stored);
    auto read = std::make_unique<Plugin>(wrap(stored.create(creator, TensorRTPhase::kRUNTIME)));
    cloned.reset();
    CHECK(Fields::copyOf(*read->runtime->getFieldsToSerialize()) == stored);
    Plugin const attached = wrap(read->runtime->attachToContext(nullptr));
    CHECK(attached.object != read->object);
    read.reset();
    CHECK(Fields::copyOf(*attached.runtime->getFieldsToSerialize()) == stored);
    CHECK_CONTAINS(attached.build->getMetadataString(), "kv_dtype=fp8");
    Fields const damaged = Fields{stored}.set(integer("workspace_bytes", -1));
    CHECK_CONTAINS(capturedStderr([&] { CHECK(damaged.create(creator, TensorRTPhase::kRUNTIME) == nullptr); }),
        "workspace_bytes -1 < 0: the engine is damaged; build it again");
}

// --- Running on host memory ------------------------------------------------------------------------------------------

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

//! Attention over a dictionary of positions, in double: it knows no ring.
class Oracle
{
public:
    using Row = std::vector<float>; //!< one token: [kv heads, head dim]

    void append(int64_t position, float const* k, float const* v)
    {
        mK[position] = Row(k, k + 128);
        mV[position] = Row(v, v + 128);
    }

    std::vector<double> answer(int64_t query, float const* q, std::function<bool(int64_t)> const& sees) const
    {
        std::vector<double> out(256, 0.0);
        for (size_t head = 0; head < 4; ++head)
        {
            double total = 0.0;
            size_t const kv = head / 2 * 64;
            for (auto const& [position, key] : mK)
            {
                if (position > query || !sees(position))
                {
                    continue;
                }
                double score = 0.0;
                for (size_t i = 0; i < 64; ++i)
                {
                    score += static_cast<double>(q[head * 64 + i]) * static_cast<double>(key[kv + i]);
                }
                double const weight = std::exp(score * 0.125);
                total += weight;
                for (size_t i = 0; i < 64; ++i)
                {
                    out[head * 64 + i] += weight * static_cast<double>(mV.at(position)[kv + i]);
                }
            }
            for (size_t i = 0; i < 64; ++i)
            {
                out[head * 64 + i] /= total;
            }
        }
        return out;
    }

private:
    std::map<int64_t, Row> mK;
    std::map<int64_t, Row> mV;
};

struct alignas(16) Aligned16
{
    float values[4];
};

//! Host memory of floats on a 16-byte boundary, as the launcher demands.
class Buffer
{
public:
    explicit Buffer(size_t count, float value = 0.0F)
        : mStorage((count + 3) / 4)
    {
        std::fill_n(data(), count, value);
    }

    explicit Buffer(std::vector<float> const& values)
        : Buffer(values.size())
    {
        std::copy(values.begin(), values.end(), data());
    }

    float* data()
    {
        return mStorage.data()->values;
    }

private:
    std::vector<Aligned16> mStorage;
};

//! The calls an execution context makes, on host memory: onShapeChange once, then enqueue.
int32_t enqueue(Plugin const& plugin, Tensors const& tensors, std::vector<void const*> const& in,
    std::vector<void*> const& out, void* workspace)
{
    return plugin.runtime->enqueue(tensors.in.data(), tensors.out.data(), in.data(), out.data(), workspace, nullptr);
}

//! 40 steps with rollback over several wraps of the ring, each answer compared with the oracle.
void stepsAgreeWithOracle(LoadedPlugin const& loaded)
{
    Plugin const built = wrap(Fields{}.create(*loaded.creator()));
    Tensors const tensors;
    CHECK(tensors.configure(built) == 0);
    std::vector<Aligned16> workspace((tensors.workspace(built) + 15) / 16);
    Fields const stored = Fields::copyOf(*built.runtime->getFieldsToSerialize());
    Plugin const read = wrap(stored.create(*loaded.creator(), TensorRTPhase::kRUNTIME));
    Plugin const plugin = wrap(read.runtime->attachToContext(nullptr));
    CHECK(tensors.onShapeChange(plugin) == 0);

    std::mt19937 random{7};
    Buffer ringK(4 * 20 * 128, std::nanf("")), ringV(4 * 20 * 128, std::nanf(""));
    Oracle oracles[3];
    int64_t starts[3]{0, 0, 0};
    int32_t const lanes[3]{2, 0, 3};
    int32_t const rowOffsets[4]{0, 5, 10, 15}, queryOffsets[4]{0, 2, 4, 6};
    for (int step = 0; step < 40; ++step)
    {
        Buffer q{randomFloats(random, 6 * 256)}, k{randomFloats(random, 15 * 128)}, v{randomFloats(random, 15 * 128)};
        Buffer out(6 * 256, std::nanf(""));
        CHECK(enqueue(plugin, tensors,
                  {q.data(), k.data(), v.data(), rowOffsets, queryOffsets, starts, lanes, ringK.data(), ringV.data()},
                  {out.data(), ringK.data(), ringV.data()}, workspace.data())
            == 0);
        for (size_t b = 0; b < 3; ++b)
        {
            for (size_t i = 0; i < 5; ++i)
            {
                size_t const row = b * 5 + i;
                oracles[b].append(starts[b] + static_cast<int64_t>(i), k.data() + row * 128, v.data() + row * 128);
            }
            for (size_t i = 0; i < 2; ++i)
            {
                int64_t const position = starts[b] + 3 + static_cast<int64_t>(i);
                float const* const asked = q.data() + (b * 2 + i) * 256;
                auto const expected =
                    oracles[b].answer(position, asked, [&](int64_t p) { return p < 4 || p > position - 12; });
                for (size_t element = 0; element < 256; ++element)
                {
                    double const got = static_cast<double>(out.data()[(b * 2 + i) * 256 + element]);
                    CHECK(std::abs(got - expected[element]) < 1e-4);
                }
            }
            starts[b] += 1 + static_cast<int64_t>(random() % 5);
        }
    }
}

//! A tree: the two rows of a request are siblings, and neither sees the other.
void treeRowsSeeAncestorsOnly(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    Tensors const tensors{DataType::kFLOAT, DataType::kFLOAT, true, 1, 2, 2};
    CHECK(tensors.configure(plugin) == 0);
    CHECK(tensors.onShapeChange(plugin) == 0);
    std::vector<Aligned16> workspace((tensors.workspace(plugin) + 15) / 16);
    std::mt19937 random{11};
    Buffer ringK(4 * 20 * 128), ringV(4 * 20 * 128), out(2 * 256);
    Buffer q{randomFloats(random, 2 * 256)}, k{randomFloats(random, 2 * 128)}, v{randomFloats(random, 2 * 128)};
    int64_t const start[1]{0};
    int32_t const lane[1]{1}, offsets[2]{0, 2};
    uint32_t const mask[2]{1U, 2U};
    CHECK(enqueue(plugin, tensors,
              {q.data(), k.data(), v.data(), offsets, offsets, start, lane, ringK.data(), ringV.data(), mask},
              {out.data(), ringK.data(), ringV.data()}, workspace.data())
        == 0);
    // A row that sees itself only returns its own value.
    for (size_t row = 0; row < 2; ++row)
    {
        for (size_t head = 0; head < 4; ++head)
        {
            for (size_t i = 0; i < 64; ++i)
            {
                float const got = out.data()[row * 256 + head * 64 + i];
                CHECK(std::abs(got - v.data()[row * 128 + head / 2 * 64 + i]) < 1e-6F);
            }
        }
    }
}

void enqueueRefusals(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    Tensors const tensors;
    Buffer q(6 * 256), k(15 * 128), v(15 * 128), ringK(4 * 20 * 128), ringV(4 * 20 * 128), copy(4 * 20 * 128);
    Buffer out(6 * 256);
    int64_t const starts[3]{0, 0, 0};
    int32_t const lanes[3]{2, 0, 3}, rowOffsets[4]{0, 5, 10, 15}, queryOffsets[4]{0, 2, 4, 6};
    std::vector<void const*> in{
        q.data(), k.data(), v.data(), rowOffsets, queryOffsets, starts, lanes, ringK.data(), ringV.data()};
    std::vector<void*> outs{out.data(), ringK.data(), ringV.data()};
    std::vector<Aligned16> workspace(1 << 14);
    auto const refusal = [&](void* scratch)
    { return capturedStderr([&] { CHECK(enqueue(plugin, tensors, in, outs, scratch) != 0); }); };
    CHECK_CONTAINS(refusal(workspace.data()), "no shape: onShapeChange must succeed first");
    CHECK(tensors.configure(plugin) == 0);
    CHECK(tensors.onShapeChange(plugin) == 0);
    outs[2] = copy.data();
    CHECK_CONTAINS(refusal(workspace.data()), "ring_v_out is not the buffer of ring_v: the ring is updated in place");
    outs[2] = ringV.data();
    CHECK_CONTAINS(refusal(nullptr), "workspace is null: this shape needs");
    in[1] = nullptr;
    CHECK_CONTAINS(refusal(workspace.data()), "k is null");
    in[1] = k.data() + 1;
    CHECK_CONTAINS(refusal(workspace.data()), "k is not aligned to 16 bytes");
    in[1] = k.data();
    CHECK(enqueue(plugin, tensors, in, outs, workspace.data()) == 0);
    // A refused shape leaves nothing behind that could still be launched.
    Tensors bad;
    bad.in[8].dims.d[0] = 5;
    capturedStderr([&] { CHECK(bad.onShapeChange(plugin) != 0); });
    CHECK_CONTAINS(refusal(workspace.data()), "no shape");
    // What the launcher returns is reported by name.
    Plugin const half = wrap(Fields{}.create(*loaded.creator()));
    Tensors const halves{DataType::kHALF, DataType::kHALF};
    CHECK(halves.configure(half) == 0);
    CHECK(halves.onShapeChange(half) == 0);
    CHECK_CONTAINS(capturedStderr([&] { CHECK(enqueue(half, halves, in, outs, workspace.data()) != 0); }),
        "launching the kernels failed: operation not supported");
}

//! Where no GPU is, the real launcher says so in words and nothing crashes.
void noDeviceIsReported(LoadedPlugin const& loaded)
{
    Plugin const plugin = wrap(Fields{}.create(*loaded.creator()));
    Tensors const tensors;
    CHECK(tensors.configure(plugin) == 0);
    std::string const message = capturedStderr([&] { CHECK(tensors.onShapeChange(plugin) != 0); });
    CHECK_CONTAINS(message, "asking the device for its multiprocessors failed: ");
}

} // namespace

int main(int argc, char** argv)
{
    std::map<std::string, void (*)(LoadedPlugin const&)> const scenarios{{"listed", listed},
        {"good_fields", goodFields}, {"bad_fields", badFields}, {"interfaces", interfaces}, {"aliases", aliases},
        {"tactics", tactics}, {"outputs", outputs}, {"formats", formats}, {"shape_rules", shapeRules},
        {"workspace", workspace}, {"round_trips", roundTrips}, {"steps_agree_with_oracle", stepsAgreeWithOracle},
        {"tree_rows_see_ancestors_only", treeRowsSeeAncestorsOnly}, {"enqueue_refusals", enqueueRefusals},
        {"no_device_is_reported", noDeviceIsReported}};
    if (argc != 4 || scenarios.count(argv[3]) == 0)
    {
        std::printf("usage: %s <TensorRT library> <plugin library> <scenario>; scenarios:\n", argv[0]);
        for (auto const& [name, run] : scenarios)
        {
            std::printf("  %s\n", name.c_str());
        }
        return 2;
    }
    LoadedPlugin const loaded{argv[1], argv[2]};
    scenarios.at(argv[3])(loaded);
    std::printf("ok %s\n", argv[3]);
    return 0;
}
