#include "kernel.h"

#include <cstring>
#include <string>

namespace pagegraft {
namespace {

using ort::Api;
using ort::KernelContext;
using ort::Status;

struct LoopContext {
  const Api* api;
  const KernelContext* context;
};

void parallel_for(void* context, std::int64_t count, void (*body)(void*, std::size_t), void* data) {
  const auto* loop = static_cast<const LoopContext*>(context);
  Status* status = loop->api->KernelContext_ParallelFor(loop->context, body, static_cast<std::size_t>(count), 0, data);
  if (status == nullptr) return;
  loop->api->ReleaseStatus(status);  // no pool to be had: the loop still has to run
  for (std::int64_t i = 0; i < count; ++i) body(data, static_cast<std::size_t>(i));
}

}  // namespace

Status* Kernel::compute(KernelContext* context) const {
  Call call;
  Sizes sizes;
  if (Status* status = read_inputs(context, &call)) return status;
  std::string error = check_shapes(config_, call, &sizes);
  if (error.empty()) error = check_values(config_, call, sizes);
  if (!error.empty()) return api_->CreateStatus(ort::kInvalidArgument, error.c_str());
  if (Status* status = make_outputs(context, sizes, &call)) return status;
  const LoopContext loop{api_, context};
  error = run(config_, call, sizes, Parallel{parallel_for, const_cast<LoopContext*>(&loop)});
  return error.empty() ? nullptr : api_->CreateStatus(ort::kFail, error.c_str());
}

Status* Kernel::read_inputs(KernelContext* context, Call* call) const {
  for (std::size_t i = 0; i < inputs_ && i < contract::kInputCount; ++i) {
    const ort::Value* value = nullptr;
    if (Status* status = api_->KernelContext_GetInput(context, i, &value)) return status;
    if (value == nullptr) continue;
    if (Status* status = read_tensor(value, i, &call->in[i])) return status;
  }
  return nullptr;
}

Status* Kernel::read_tensor(const ort::Value* value, std::size_t index, Tensor* tensor) const {
  ort::TensorInfo* info = nullptr;
  if (Status* status = api_->GetTensorTypeAndShape(value, &info)) return status;
  std::size_t rank = 0;
  Status* status = api_->GetDimensionsCount(info, &rank);
  if (status == nullptr && rank > 4) {
    status = api_->CreateStatus(ort::kInvalidArgument, (std::string("PagedAttention input '") +
                                                        contract::kInputNames[index] + "': expected at most 4 dimensions, got " +
                                                        std::to_string(rank)).c_str());
  }
  if (status == nullptr) status = api_->GetDimensions(info, tensor->dims, rank);
  api_->ReleaseTensorTypeAndShapeInfo(info);
  void* data = nullptr;
  if (status == nullptr) status = api_->GetTensorMutableData(const_cast<ort::Value*>(value), &data);
  tensor->data = data;
  tensor->rank = static_cast<int>(rank);
  tensor->present = true;
  return status;
}

Status* Kernel::make_outputs(KernelContext* context, const Sizes& s, Call* call) const {
  const std::int64_t dims[] = {s.T, s.H * s.Dv};
  ort::Value* value = nullptr;
  if (Status* status = api_->KernelContext_GetOutput(context, contract::kOutput, dims, 2, &value)) return status;
  if (Status* status = api_->GetTensorMutableData(value, &call->output)) return status;
  const std::int64_t cache = element_size(config_.cache);
  void* scales[2] = {nullptr, nullptr};
  Status* status = alias(context, contract::kKeyCacheOut, call->in[contract::kKeyCache], cache, &call->key_cache);
  if (status == nullptr) {
    status = alias(context, contract::kValueCacheOut, call->in[contract::kValueCache], cache, &call->value_cache);
  }
  if (status == nullptr) status = alias(context, contract::kKScaleOut, call->in[contract::kKScale], 4, &scales[0]);
  if (status == nullptr) status = alias(context, contract::kVScaleOut, call->in[contract::kVScale], 4, &scales[1]);
  call->k_scale = static_cast<float*>(scales[0]);
  call->v_scale = static_cast<float*>(scales[1]);
  if (config_.latent) call->value_cache = call->key_cache;
  return status;
}

// Memory to update in place: the output's when the node has it, copied into unless it is the input's own memory;
// else the input's.
Status* Kernel::alias(KernelContext* context, std::size_t output, const Tensor& input, std::int64_t size, void** data) const {
  *data = const_cast<void*>(input.data);
  if (output >= outputs_ || !input.present) return nullptr;
  ort::Value* value = nullptr;
  if (Status* status = api_->KernelContext_GetOutput(context, output, input.dims, static_cast<std::size_t>(input.rank), &value)) {
    return status;
  }
  if (value == nullptr) return nullptr;
  if (Status* status = api_->GetTensorMutableData(value, data)) return status;
  if (*data == input.data) return nullptr;
  std::size_t bytes = static_cast<std::size_t>(size);
  for (int i = 0; i < input.rank; ++i) bytes *= static_cast<std::size_t>(input.dims[i]);
  if (bytes != 0) std::memcpy(*data, input.data, bytes);
  return nullptr;
}

}  // namespace pagegraft
