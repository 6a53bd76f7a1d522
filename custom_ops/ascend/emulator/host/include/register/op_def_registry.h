// Host model of the registration and context classes that op_host uses: enough to compile it unmodified and to run its
// shape inference and tiling here. With CANN installed its own headers take the place of this folder.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ge {

enum DataType { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_INT8 = 2, DT_INT32 = 3, DT_BF16 = 27, DT_UNDEFINED = 28 };
enum Format { FORMAT_ND = 2 };
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
constexpr graphStatus GRAPH_FAILED = 0xFFFFFFFF;

}  // namespace ge

namespace gert {

class Shape {
public:
    Shape() = default;
    explicit Shape(std::vector<int64_t> dims) : dims_(std::move(dims)) {}
    size_t GetDimNum() const { return dims_.size(); }
    void SetDimNum(size_t count) { dims_.resize(count); }
    int64_t GetDim(size_t index) const { return dims_.at(index); }
    void SetDim(size_t index, int64_t value) { dims_.at(index) = value; }

private:
    std::vector<int64_t> dims_;
};

class StorageShape {
public:
    StorageShape() = default;
    explicit StorageShape(Shape shape) : shape_(std::move(shape)) {}
    const Shape& GetStorageShape() const { return shape_; }
    const Shape& GetOriginShape() const { return shape_; }

private:
    Shape shape_;
};

template <typename T>
class TypedContinuousVector {
public:
    explicit TypedContinuousVector(std::vector<T> values) : values_(std::move(values)) {}
    size_t GetSize() const { return values_.size(); }
    const T* GetData() const { return values_.data(); }

private:
    std::vector<T> values_;
};

// Attributes by their index in the operator definition; a missing one is null.
class RuntimeAttrs {
public:
    const int64_t* GetInt(size_t index) const { return Find(ints, index); }
    const float* GetFloat(size_t index) const { return Find(floats, index); }
    const char* GetStr(size_t index) const {
        const std::string* text = Find(strings, index);
        return text == nullptr ? nullptr : text->c_str();
    }
    const TypedContinuousVector<float>* GetListFloat(size_t index) const { return Find(lists, index); }

    std::map<size_t, int64_t> ints;
    std::map<size_t, float> floats;
    std::map<size_t, std::string> strings;
    std::map<size_t, TypedContinuousVector<float>> lists;

private:
    template <typename T>
    static const T* Find(const std::map<size_t, T>& values, size_t index) {
        const auto at = values.find(index);
        return at == values.end() ? nullptr : &at->second;
    }
};

class CompileTimeTensorDesc {
public:
    explicit CompileTimeTensorDesc(ge::DataType type = ge::DT_UNDEFINED) : type_(type) {}
    ge::DataType GetDataType() const { return type_; }

private:
    ge::DataType type_;
};

// What the model keeps of a node: inputs by their index in the definition, absent optional ones left out.
struct NodeState {
    std::map<size_t, StorageShape> shapes;
    std::map<size_t, CompileTimeTensorDesc> types;
    RuntimeAttrs attributes;
    std::map<size_t, Shape> output_shapes;
    std::map<size_t, ge::DataType> output_types;
    std::vector<uint8_t> tiling;
    std::vector<size_t> workspaces;
    uint32_t block_dim = 0, schedule_mode = 0;
};

class InferShapeContext {
public:
    explicit InferShapeContext(NodeState& node) : node_(node) {}
    const Shape* GetRequiredInputShape(size_t index) const { return GetOptionalInputShape(index); }
    const Shape* GetOptionalInputShape(size_t index) const {
        const auto at = node_.shapes.find(index);
        return at == node_.shapes.end() ? nullptr : &at->second.GetStorageShape();
    }
    Shape* GetOutputShape(size_t index) { return &node_.output_shapes[index]; }
    const RuntimeAttrs* GetAttrs() const { return &node_.attributes; }

private:
    NodeState& node_;
};

class InferDataTypeContext {
public:
    explicit InferDataTypeContext(NodeState& node) : node_(node) {}
    ge::DataType GetRequiredInputDataType(size_t index) const { return node_.types.at(index).GetDataType(); }
    ge::graphStatus SetOutputDataType(size_t index, ge::DataType type) {
        node_.output_types[index] = type;
        return ge::GRAPH_SUCCESS;
    }

private:
    NodeState& node_;
};

}  // namespace gert

namespace fe {
// Stands for the platform description; the model's device is in tiling/platform/platform_ascendc.h.
struct PlatFormInfos {
    uint32_t vector_cores = 48;
    uint64_t ub_bytes = 192 * 1024;
};
}  // namespace fe

namespace gert {

class TilingContext {
public:
    TilingContext(NodeState& node, fe::PlatFormInfos& platform) : node_(node), platform_(platform) {}
    const StorageShape* GetRequiredInputShape(size_t index) const { return GetOptionalInputShape(index); }
    const StorageShape* GetOptionalInputShape(size_t index) const {
        const auto at = node_.shapes.find(index);
        return at == node_.shapes.end() ? nullptr : &at->second;
    }
    const CompileTimeTensorDesc* GetRequiredInputDesc(size_t index) const {
        const auto at = node_.types.find(index);
        return at == node_.types.end() ? nullptr : &at->second;
    }
    const RuntimeAttrs* GetAttrs() const { return &node_.attributes; }
    fe::PlatFormInfos* GetPlatformInfo() const { return &platform_; }
    template <typename T>
    T* GetTilingData() {
        node_.tiling.resize(sizeof(T));
        return reinterpret_cast<T*>(node_.tiling.data());
    }
    ge::graphStatus SetBlockDim(uint32_t count) {
        node_.block_dim = count;
        return ge::GRAPH_SUCCESS;
    }
    ge::graphStatus SetScheduleMode(uint32_t mode) {
        node_.schedule_mode = mode;
        return ge::GRAPH_SUCCESS;
    }
    size_t* GetWorkspaceSizes(size_t count) {
        node_.workspaces.resize(count);
        return node_.workspaces.data();
    }

private:
    NodeState& node_;
    fe::PlatFormInfos& platform_;
};

}  // namespace gert

namespace ops {

enum Option { IGNORE = 0, OPTIONAL = 1, REQUIRED = 2, DYNAMIC = 3 };

class OpParamDef {
public:
    explicit OpParamDef(std::string given) : name(std::move(given)) {}
    OpParamDef& ParamType(Option value) {
        option = value;
        return *this;
    }
    OpParamDef& DataType(std::vector<ge::DataType> values) {
        types = std::move(values);
        return *this;
    }
    OpParamDef& Format(std::vector<ge::Format> values) {
        formats = std::move(values);
        return *this;
    }
    OpParamDef& UnknownShapeFormat(std::vector<ge::Format>) { return *this; }

    std::string name;
    Option option = IGNORE;
    std::vector<ge::DataType> types;
    std::vector<ge::Format> formats;
};

class OpAttrDef {
public:
    explicit OpAttrDef(std::string given) : name(std::move(given)) {}
    OpAttrDef& AttrType(Option value) {
        option = value;
        return *this;
    }
    OpAttrDef& Int(int64_t value = 0) { return Set("INT", std::to_string(value)); }
    OpAttrDef& Float(float value = 0.0f) { return Set("FLOAT", std::to_string(value)); }
    OpAttrDef& String(const char* value = "") { return Set("STRING", value); }
    OpAttrDef& ListFloat(std::vector<float> value = {}) { return Set("FLOATS", value.empty() ? "" : "values"); }

    std::string name, kind, initial;
    Option option = IGNORE;

private:
    OpAttrDef& Set(const char* type, std::string value) {
        kind = type;
        initial = std::move(value);
        return *this;
    }
};

class OpAICoreDef {
public:
    OpAICoreDef& SetTiling(ge::graphStatus (*function)(gert::TilingContext*)) {
        tiling = function;
        return *this;
    }
    void AddConfig(const char* soc) { socs.emplace_back(soc); }
    ge::graphStatus (*tiling)(gert::TilingContext*) = nullptr;
    std::vector<std::string> socs;
};

class OpDef {
public:
    explicit OpDef(const char* type) : type(type) {}
    virtual ~OpDef() = default;
    OpParamDef& Input(const char* name) { return Added(inputs, name); }
    OpParamDef& Output(const char* name) { return Added(outputs, name); }
    OpAttrDef& Attr(const char* name) { return Added(attributes, name); }
    OpDef& SetInferShape(ge::graphStatus (*function)(gert::InferShapeContext*)) {
        infer_shape = function;
        return *this;
    }
    OpDef& SetInferDataType(ge::graphStatus (*function)(gert::InferDataTypeContext*)) {
        infer_type = function;
        return *this;
    }
    OpAICoreDef& AICore() { return core; }

    std::string type;
    std::vector<std::unique_ptr<OpParamDef>> inputs, outputs;
    std::vector<std::unique_ptr<OpAttrDef>> attributes;
    OpAICoreDef core;
    ge::graphStatus (*infer_shape)(gert::InferShapeContext*) = nullptr;
    ge::graphStatus (*infer_type)(gert::InferDataTypeContext*) = nullptr;

private:
    template <typename T>
    static T& Added(std::vector<std::unique_ptr<T>>& list, const char* name) {
        list.emplace_back(new T(name));
        return *list.back();
    }
};

inline std::vector<std::unique_ptr<OpDef>>& Registered() {
    static std::vector<std::unique_ptr<OpDef>> definitions;
    return definitions;
}

}  // namespace ops

#define OP_ADD(Type) static const bool registered##Type = (Registered().emplace_back(new Type(#Type)), true)
