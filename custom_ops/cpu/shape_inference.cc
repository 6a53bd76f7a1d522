// Shapes of the outputs from those of the inputs. onnxruntime's C++ header marks symbolic dimensions with -2, which
// newer releases reject and then lose every shape downstream; through the C interface a dimension is -1 with a name.
// A dimension without a name cannot be said here, so an output that would need one is left to the model's value_info.
#include "shape_inference.h"

#include <string>
#include <vector>

namespace pagegraft {
namespace {

using ort::Api;
using ort::ShapeInferContext;
using ort::Status;
using ort::TensorInfo;

struct Shape {
  std::vector<std::int64_t> dims;
  std::vector<std::string> names;
  ort::ElementType type = ort::kUndefined;

  bool known(std::size_t i) const { return i < dims.size() && dims[i] >= 0; }
};

class Inference {
 public:
  Inference(const Api* api, ShapeInferContext* context) : api_(api), context_(context) {}

  bool input(std::size_t index, Shape* shape) const {
    std::size_t count = 0;
    if (!ok(api_->ShapeInferContext_GetInputCount(context_, &count)) || index >= count) return false;
    TensorInfo* info = nullptr;  // owned by the context
    if (!ok(api_->ShapeInferContext_GetInputTypeShape(context_, index, &info)) || info == nullptr) return false;
    std::size_t rank = 0;
    if (!ok(api_->GetDimensionsCount(info, &rank)) || rank == 0) return false;
    shape->dims.resize(rank);
    std::vector<const char*> names(rank, "");
    if (!ok(api_->GetDimensions(info, shape->dims.data(), rank))) return false;
    if (!ok(api_->GetSymbolicDimensions(info, names.data(), rank))) return false;
    for (const char* name : names) shape->names.emplace_back(name == nullptr ? "" : name);
    return ok(api_->GetTensorElementType(info, &shape->type));
  }

  std::int64_t attribute(const char* name) const {
    const ort::OpAttr* attr = nullptr;
    std::int64_t value = 0;
    std::size_t size = 0;
    if (!ok(api_->ShapeInferContext_GetAttribute(context_, name, &attr)) || attr == nullptr) return 0;
    return ok(api_->ReadOpAttr(attr, ort::kAttrInt, &value, sizeof(value), &size)) ? value : 0;
  }

  void output(std::size_t index, const Shape& shape) const {
    std::vector<const char*> names;
    for (std::size_t i = 0; i < shape.dims.size(); ++i) {
      if (shape.dims[i] < 0 && shape.names[i].empty()) return;
      names.push_back(shape.dims[i] < 0 ? shape.names[i].c_str() : "");
    }
    TensorInfo* info = nullptr;
    if (!ok(api_->CreateTensorTypeAndShapeInfo(&info))) return;
    std::vector<std::int64_t> dims;
    for (std::int64_t d : shape.dims) dims.push_back(d < 0 ? -1 : d);
    // An output that the node does not have is refused here; that is no error.
    if (ok(api_->SetTensorElementType(info, shape.type)) && ok(api_->SetDimensions(info, dims.data(), dims.size())) &&
        ok(api_->SetSymbolicDimensions(info, names.data(), names.size()))) {
      ok(api_->ShapeInferContext_SetOutputTypeShape(context_, index, info));
    }
    api_->ReleaseTensorTypeAndShapeInfo(info);
  }

 private:
  bool ok(Status* status) const {
    if (status == nullptr) return true;
    api_->ReleaseStatus(status);
    return false;
  }

  const Api* api_;
  ShapeInferContext* context_;
};

// Width of the output, or -1 when the inputs' shapes do not tell.
std::int64_t output_width(const Inference& inference, const Shape& query) {
  const std::int64_t heads = inference.attribute("num_heads");
  const std::int64_t groups = inference.attribute("kv_num_heads");
  const std::int64_t latent_head = inference.attribute("v_head_size");
  Shape value, value_cache, key;
  constexpr std::int64_t kMost = 1 << 20;  // beyond sense; keeps the products below from overflowing
  if (heads < 1 || groups < 1 || heads > kMost || latent_head > kMost) return -1;
  if (latent_head > 0) return heads * latent_head;
  if (inference.input(contract::kValue, &value)) return value.known(1) ? value.dims[1] / groups * heads : -1;
  if (inference.input(contract::kValueCache, &value_cache)) {
    // Two int4 values share a byte, so the width does not tell an odd size. onnxruntime calls the inference of the
    // first variant for all of them: only the node's own types say what the cache holds.
    return value_cache.known(3) && value_cache.type != ort::kUint8 ? value_cache.dims[3] * heads : -1;
  }
  return query.known(1) && inference.input(contract::kKey, &key) ? query.dims[1] : -1;  // LATENT with Dv = D
}

}  // namespace

void infer_output_shapes(const Api* api, ShapeInferContext* context) {
  const Inference inference(api, context);
  Shape query;
  if (inference.input(contract::kQuery, &query) && query.dims.size() == 2) {
    const std::int64_t width = output_width(inference, query);
    if (width > 0) {
      Shape out = query;
      out.dims[1] = width;
      inference.output(contract::kOutput, out);
    }
  }
  static constexpr std::size_t kAliases[][2] = {{contract::kKeyCache, contract::kKeyCacheOut},
                                                {contract::kValueCache, contract::kValueCacheOut},
                                                {contract::kKScale, contract::kKScaleOut},
                                                {contract::kVScale, contract::kVScaleOut}};
  for (const auto& pair : kAliases) {
    Shape shape;
    if (inference.input(pair[0], &shape)) inference.output(pair[1], shape);
  }
}

}  // namespace pagegraft
