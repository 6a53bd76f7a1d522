// C interface for the tests of op_host and of the ONNX plugin: describes the definition, runs inference and tiling.
#include <cstdio>
#include <cstring>
#include <string>

#include "../../op_kernel/paged_attention_tiling_data.h"
#include "register/op_def_registry.h"
#include "register/register.h"

namespace {

const ops::OpDef& Definition() { return *ops::Registered().front(); }

void Describe(std::string& out, const char* role, const ops::OpParamDef& p) {
    out += std::string(role) + " " + p.name + (p.option == ops::REQUIRED ? " required" : " optional");
    for (const ge::DataType type : p.types) { out += " " + std::to_string(type); }
    out += "\n";
}

int64_t Copy(const std::string& text, char* out, int64_t capacity) {
    std::snprintf(out, static_cast<size_t>(capacity), "%s", text.c_str());
    return static_cast<int64_t>(text.size());
}

}  // namespace

extern "C" {

// One line per input, output and attribute of the definition, and per registered plugin name.
int64_t pg_host_describe(char* out, int64_t capacity) {
    std::string text = "type " + Definition().type + "\n";
    for (const auto& p : Definition().inputs) { Describe(text, "input", *p); }
    for (const auto& p : Definition().outputs) { Describe(text, "output", *p); }
    for (const auto& a : Definition().attributes) {
        text += "attribute " + a->name + (a->option == ops::REQUIRED ? " required " : " optional ") + a->kind + " " + a->initial + "\n";
    }
    for (const auto& plugin : domi::Plugins()) {
        for (const std::string& origin : plugin.origins) { text += "origin " + origin + " " + plugin.type + "\n"; }
    }
    return Copy(text, out, capacity);
}

// A node under construction.
void* pg_host_node() { return new gert::NodeState(); }
void pg_host_free(void* node) { delete static_cast<gert::NodeState*>(node); }
void pg_host_input(void* node, int64_t index, int64_t type, const int64_t* dims, int64_t rank) {
    auto& state = *static_cast<gert::NodeState*>(node);
    state.shapes[static_cast<size_t>(index)] = gert::StorageShape(gert::Shape(std::vector<int64_t>(dims, dims + rank)));
    state.types[static_cast<size_t>(index)] = gert::CompileTimeTensorDesc(static_cast<ge::DataType>(type));
}
void pg_host_int(void* node, int64_t index, int64_t value) {
    static_cast<gert::NodeState*>(node)->attributes.ints[static_cast<size_t>(index)] = value;
}
void pg_host_float(void* node, int64_t index, float value) {
    static_cast<gert::NodeState*>(node)->attributes.floats[static_cast<size_t>(index)] = value;
}
void pg_host_string(void* node, int64_t index, const char* value) {
    static_cast<gert::NodeState*>(node)->attributes.strings[static_cast<size_t>(index)] = value;
}
void pg_host_floats(void* node, int64_t index, const float* values, int64_t count) {
    static_cast<gert::NodeState*>(node)->attributes.lists.emplace(
        static_cast<size_t>(index), gert::TypedContinuousVector<float>(std::vector<float>(values, values + count)));
}

// Runs shape and type inference; per output "type dim dim ...". Empty text: inference failed.
int64_t pg_host_infer(void* node, char* out, int64_t capacity) {
    auto& state = *static_cast<gert::NodeState*>(node);
    gert::InferShapeContext shapes(state);
    gert::InferDataTypeContext types(state);
    std::string text;
    if (Definition().infer_shape(&shapes) == ge::GRAPH_SUCCESS && Definition().infer_type(&types) == ge::GRAPH_SUCCESS) {
        for (const auto& [index, shape] : state.output_shapes) {
            text += std::to_string(state.output_types.at(index));
            for (size_t i = 0; i < shape.GetDimNum(); ++i) { text += " " + std::to_string(shape.GetDim(i)); }
            text += "\n";
        }
    }
    return Copy(text, out, capacity);
}

// Runs the tiling function; 0 when it accepts. `data` receives the tiling struct, `sizes` block dim, schedule mode, workspace.
int64_t pg_host_tile(void* node, int64_t cores, pagegraft::PagedAttentionTilingData* data, int64_t* sizes) {
    auto& state = *static_cast<gert::NodeState*>(node);
    fe::PlatFormInfos platform;
    platform.vector_cores = static_cast<uint32_t>(cores);
    gert::TilingContext context(state, platform);
    if (Definition().core.tiling(&context) != ge::GRAPH_SUCCESS) { return 1; }
    std::memcpy(data, state.tiling.data(), sizeof(*data));
    sizes[0] = state.block_dim;
    sizes[1] = state.schedule_mode;
    sizes[2] = static_cast<int64_t>(state.workspaces.at(0));
    return 0;
}

// Runs the plugin on an attribute text; lines "name=value". Returns -1 when the plugin refuses.
int64_t pg_host_parse(const char* attributes, char* out, int64_t capacity) {
    ge::Operator source, target;
    source.SetAttr("attribute", ge::AscendString(attributes));
    if (domi::Plugins().front().parse(source, target) != domi::SUCCESS) { return -1; }
    std::string text;
    for (const auto& [name, value] : target.attributes) { text += name + "=" + value + "\n"; }
    return Copy(text, out, capacity);
}
}
