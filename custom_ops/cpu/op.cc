// The onnxruntime face of the kernel: registers PagedAttention for CPU under both domains, one variant for each pair of
// compute and cache type, and makes its kernels.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "kernel.h"
#include "node_config.h"
#include "ort_abi.h"
#include "paged_attention.h"
#include "shape_inference.h"

namespace pagegraft {
namespace {

using ort::Api;
using ort::ElementType;
using ort::KernelContext;
using ort::Status;
namespace contract = pagegraft::contract;

constexpr Type kComputeTypes[] = {Type::kFloat32, Type::kFloat16, Type::kBFloat16};
constexpr Type kCacheTypes[] = {Type::kFloat32, Type::kFloat16, Type::kBFloat16,
                                Type::kInt8,    Type::kFloat8,  Type::kInt4};

ElementType element_type(Type type) {
  switch (type) {
    case Type::kFloat32:
      return ort::kFloat;
    case Type::kFloat16:
      return ort::kFloat16;
    case Type::kBFloat16:
      return ort::kBFloat16;
    case Type::kInt8:
      return ort::kInt8;
    case Type::kFloat8:
      return ort::kFloat8E4M3FN;
    default:
      return ort::kUint8;
  }
}

struct Variant : ort::CustomOp {
  const Api* api = nullptr;
  bool microsoft = false;
  Type compute = Type::kFloat32;
  Type cache = Type::kFloat32;
};

const Variant& variant(const ort::CustomOp* op) { return *static_cast<const Variant*>(op); }

ElementType input_type(const ort::CustomOp* op, std::size_t index) {
  switch (index) {
    case contract::kKeyCache:
    case contract::kValueCache:
      return element_type(variant(op).cache);
    case contract::kCumulativeSequenceLength:
    case contract::kPastSeqlens:
    case contract::kBlockTable:
    case contract::kSlotMapping:
    case contract::kAttentionMetadata:
      return ort::kInt32;
    case contract::kKScale:
    case contract::kVScale:
      return ort::kFloat;
    default:
      return element_type(variant(op).compute);
  }
}

ElementType output_type(const ort::CustomOp* op, std::size_t index) {
  if (index == contract::kOutput) return element_type(variant(op).compute);
  if (index == contract::kKeyCacheOut || index == contract::kValueCacheOut) return element_type(variant(op).cache);
  return ort::kFloat;
}

template <int kCount>
std::size_t alias_map(int** inputs, int** outputs) {
  static constexpr int kInputs[] = {contract::kKeyCache, contract::kValueCache, contract::kKScale, contract::kVScale};
  static constexpr int kOutputs[] = {contract::kKeyCacheOut, contract::kValueCacheOut, contract::kKScaleOut,
                                     contract::kVScaleOut};
  *inputs = static_cast<int*>(std::malloc(sizeof(kInputs)));
  *outputs = static_cast<int*>(std::malloc(sizeof(kOutputs)));
  if (*inputs == nullptr || *outputs == nullptr) return 0;
  std::memcpy(*inputs, kInputs, sizeof(int) * kCount);
  std::memcpy(*outputs, kOutputs, sizeof(int) * kCount);
  return kCount;
}

void release_alias_map(int* inputs, int* outputs) {
  std::free(inputs);
  std::free(outputs);
}

// Refuses a node that lacks an input which its attributes call for, or has one which they rule out.
Status* check_node_inputs(const Api* api, const ort::KernelInfo* info, const Config& config, std::size_t inputs) {
  bool present[contract::kInputCount] = {};
  for (std::size_t i = 0; i < inputs && i < contract::kInputCount; ++i) {
    std::size_t size = 0;  // of the name with its terminating zero: 1 for an input that is left out
    if (Status* status = api->KernelInfo_GetInputName(info, i, nullptr, &size)) return status;
    present[i] = size > 1;
  }
  const std::string error = check_inputs(config, present);
  return error.empty() ? nullptr : api->CreateStatus(ort::kInvalidArgument, error.c_str());
}

Status* create_kernel(const ort::CustomOp* op, const Api* api, const ort::KernelInfo* info, void** kernel) try {
  Config config;
  config.microsoft_domain = variant(op).microsoft;
  config.compute = variant(op).compute;
  config.cache = variant(op).cache;
  std::string error = read_config(api, info, &config);
  if (error.empty()) error = isa_error();
  if (!error.empty()) return api->CreateStatus(ort::kInvalidArgument, error.c_str());
  std::size_t inputs = 0, outputs = 0;
  if (Status* status = api->KernelInfo_GetInputCount(info, &inputs)) return status;
  if (Status* status = api->KernelInfo_GetOutputCount(info, &outputs)) return status;
  if (Status* status = check_node_inputs(api, info, config, inputs)) return status;
  *kernel = new Kernel(api, std::move(config), inputs, outputs);
  return nullptr;
} catch (const std::exception& error) {
  return api->CreateStatus(ort::kFail, error.what());
}

Status* compute_kernel(void* kernel, KernelContext* context);

Status* infer_shapes(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  infer_output_shapes(variant(op).api, context);
  return nullptr;
}

void fill(Variant* op) {
  op->version = ort::kApiVersion;
  op->GetName = [](const ort::CustomOp*) { return contract::kOpType; };
  op->GetExecutionProviderType = [](const ort::CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op->GetInputType = input_type;
  op->GetInputTypeCount = [](const ort::CustomOp*) -> std::size_t { return contract::kInputCount; };
  op->GetOutputType = output_type;
  op->GetOutputTypeCount = [](const ort::CustomOp* self) -> std::size_t {
    return variant(self).microsoft ? contract::kMicrosoftOutputCount : contract::kOutputCount;
  };
  op->KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op->GetInputCharacteristic = [](const ort::CustomOp*, std::size_t i) {
    return contract::kInputOptional[i] ? ort::kOptional : ort::kRequired;
  };
  op->GetOutputCharacteristic = [](const ort::CustomOp*, std::size_t i) {
    return i == contract::kOutput ? ort::kRequired : ort::kOptional;
  };
  op->GetInputMemoryType = [](const ort::CustomOp*, std::size_t) { return 0; };
  op->GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  op->GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op->GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op->GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op->CreateKernelV2 = create_kernel;
  op->KernelComputeV2 = compute_kernel;
  op->InferOutputShapeFn = infer_shapes;
  op->GetStartVersion = [](const ort::CustomOp*) { return contract::kOpVersion; };
  op->GetEndVersion = [](const ort::CustomOp*) { return contract::kOpVersion; };
  op->GetAliasMap = op->microsoft ? alias_map<2> : alias_map<4>;
  op->ReleaseAliasMap = release_alias_map;
}

// The variants live as long as the process: onnxruntime keeps pointers to them.
Variant* variants(const Api* api) {
  static Variant all[2 * 3 * 6];
  static std::once_flag once;
  std::call_once(once, [api] {
    Variant* next = all;
    for (const bool microsoft : {true, false}) {
      for (Type compute : kComputeTypes) {
        for (Type cache : kCacheTypes) {
          next->api = api;
          next->microsoft = microsoft;
          next->compute = compute;
          next->cache = cache;
          fill(next++);
        }
      }
    }
  });
  return all;
}

Status* compute_kernel(void* kernel, KernelContext* context) try {
  return static_cast<Kernel*>(kernel)->compute(context);
} catch (const std::bad_alloc&) {
  return static_cast<Kernel*>(kernel)->api()->CreateStatus(ort::kFail, "PagedAttention: out of memory for its working space");
} catch (const std::exception& error) {
  return static_cast<Kernel*>(kernel)->api()->CreateStatus(ort::kFail, error.what());
}

Status* register_domain(const Api* api, ort::SessionOptions* options, const char* name, Variant* first) {
  ort::CustomOpDomain* domain = nullptr;
  if (Status* status = api->CreateCustomOpDomain(name, &domain)) return status;
  for (int i = 0; i < 3 * 6; ++i) {
    if (Status* status = api->CustomOpDomain_Add(domain, first + i)) {
      api->ReleaseCustomOpDomain(domain);
      return status;
    }
  }
  // The session takes a reference to the domain that it never gives back, so it is not released here.
  return api->AddCustomOpDomain(options, domain);
}

}  // namespace
}  // namespace pagegraft

#define PAGEGRAFT_EXPORT extern "C" __attribute__((visibility("default")))

PAGEGRAFT_EXPORT pagegraft::ort::Status* RegisterCustomOps(pagegraft::ort::SessionOptions* options,
                                                           const pagegraft::ort::ApiBase* base) {
  using namespace pagegraft;
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  if (api == nullptr) return nullptr;  // older than API 18; pagegraft.custom_ops.register has said so
  Variant* all = variants(api);
  ort::Status* status = register_domain(api, options, contract::kMicrosoftDomain, all);
  return status != nullptr ? status : register_domain(api, options, contract::kPagegraftDomain, all + 3 * 6);
}

// Name of the instruction set that the kernel runs on in this process.
PAGEGRAFT_EXPORT const char* pagegraft_isa() { return pagegraft::isa_name(); }
