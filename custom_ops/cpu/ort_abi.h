// The part of onnxruntime's C interface that this library uses, declared by ourselves so that the build needs no
// onnxruntime headers. OrtApi is an append-only table of function pointers and OrtCustomOp a versioned struct; both
// have had these layouts since API version 18, the one asked for. Where the official header is on the include path,
// ort_abi_check.cc compares every offset with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagegraft::ort {

inline constexpr std::uint32_t kApiVersion = 18;

struct Status;
struct Value;
struct KernelContext;
struct KernelInfo;
struct SessionOptions;
struct CustomOpDomain;
struct TensorInfo;
struct TypeInfo;
struct ShapeInferContext;
struct OpAttr;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum OpAttrType : int { kAttrUndefined = 0, kAttrInt = 1, kAttrInts = 2, kAttrFloat = 3, kAttrFloats = 4, kAttrString = 5 };

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kFloat16 = 10,
  kBFloat16 = 16,
  kFloat8E4M3FN = 17,
};

struct Api;

struct ApiBase {
  const Api* (*GetApi)(std::uint32_t version);
  const char* (*GetVersionString)();
};

// Padding between the members used: X(n) reserves n table entries.
struct Api {
  Status* (*CreateStatus)(ErrorCode code, const char* message);  // 0
  ErrorCode (*GetErrorCode)(const Status* status);
  const char* (*GetErrorMessage)(const Status* status);
  void* unused_3[23];
  Status* (*CreateCustomOpDomain)(const char* domain, CustomOpDomain** out);  // 26
  Status* (*CustomOpDomain_Add)(CustomOpDomain* domain, const struct CustomOp* op);
  Status* (*AddCustomOpDomain)(SessionOptions* options, CustomOpDomain* domain);
  void* unused_29[22];
  Status* (*GetTensorMutableData)(Value* value, void** out);  // 51
  void* unused_52[3];
  Status* (*CastTypeInfoToTensorInfo)(const TypeInfo* info, const TensorInfo** out);  // 55
  void* unused_56;
  Status* (*CreateTensorTypeAndShapeInfo)(TensorInfo** out);  // 57
  Status* (*SetTensorElementType)(TensorInfo* info, ElementType type);
  Status* (*SetDimensions)(TensorInfo* info, const std::int64_t* dims, std::size_t count);
  Status* (*GetTensorElementType)(const TensorInfo* info, ElementType* out);  // 60
  Status* (*GetDimensionsCount)(const TensorInfo* info, std::size_t* out);
  Status* (*GetDimensions)(const TensorInfo* info, std::int64_t* dims, std::size_t count);
  Status* (*GetSymbolicDimensions)(const TensorInfo* info, const char** names, std::size_t count);
  void* unused_64;
  Status* (*GetTensorTypeAndShape)(const Value* value, TensorInfo** out);  // 65
  void* unused_66[19];
  Status* (*KernelInfoGetAttribute_float)(const KernelInfo* info, const char* name, float* out);  // 85
  Status* (*KernelInfoGetAttribute_int64)(const KernelInfo* info, const char* name, std::int64_t* out);
  Status* (*KernelInfoGetAttribute_string)(const KernelInfo* info, const char* name, char* out, std::size_t* size);
  Status* (*KernelContext_GetInputCount)(const KernelContext* context, std::size_t* out);
  Status* (*KernelContext_GetOutputCount)(const KernelContext* context, std::size_t* out);
  Status* (*KernelContext_GetInput)(const KernelContext* context, std::size_t index, const Value** out);  // 90
  Status* (*KernelContext_GetOutput)(KernelContext* context, std::size_t index, const std::int64_t* dims,
                                     std::size_t rank, Value** out);
  void* unused_92;
  void (*ReleaseStatus)(Status* status);  // 93
  void* unused_94[4];
  void (*ReleaseTypeInfo)(TypeInfo* info);  // 98
  void (*ReleaseTensorTypeAndShapeInfo)(TensorInfo* info);
  void* unused_100;
  void (*ReleaseCustomOpDomain)(CustomOpDomain* domain);  // 101
  void* unused_102[60];
  Status* (*KernelInfoGetAttributeArray_float)(const KernelInfo* info, const char* name, float* out,
                                               std::size_t* size);  // 162
  void* unused_163[67];
  Status* (*KernelInfo_GetInputCount)(const KernelInfo* info, std::size_t* out);  // 230
  Status* (*KernelInfo_GetOutputCount)(const KernelInfo* info, std::size_t* out);
  Status* (*KernelInfo_GetInputName)(const KernelInfo* info, std::size_t index, char* out, std::size_t* size);
  Status* (*KernelInfo_GetOutputName)(const KernelInfo* info, std::size_t index, char* out, std::size_t* size);
  Status* (*KernelInfo_GetInputTypeInfo)(const KernelInfo* info, std::size_t index, TypeInfo** out);  // 234
  void* unused_235[9];
  Status* (*KernelInfo_GetNodeName)(const KernelInfo* info, char* out, std::size_t* size);  // 244
  void* unused_245[22];
  Status* (*ShapeInferContext_GetInputCount)(const ShapeInferContext* context, std::size_t* out);  // 267
  Status* (*ShapeInferContext_GetInputTypeShape)(const ShapeInferContext* context, std::size_t index,
                                                 TensorInfo** out);
  Status* (*ShapeInferContext_GetAttribute)(const ShapeInferContext* context, const char* name, const OpAttr** out);
  Status* (*ShapeInferContext_SetOutputTypeShape)(const ShapeInferContext* context, std::size_t index,
                                                  const TensorInfo* info);  // 270
  Status* (*SetSymbolicDimensions)(TensorInfo* info, const char** names, std::size_t count);
  Status* (*ReadOpAttr)(const OpAttr* attr, OpAttrType type, void* data, std::size_t size, std::size_t* out);  // 272
  void* unused_273;
  Status* (*KernelContext_ParallelFor)(const KernelContext* context, void (*fn)(void*, std::size_t), std::size_t total,
                                       std::size_t batches, void* data);  // 274
};

static_assert(offsetof(Api, KernelContext_ParallelFor) == 274 * sizeof(void*));
static_assert(offsetof(Api, KernelInfoGetAttribute_float) == 85 * sizeof(void*));
static_assert(offsetof(Api, KernelInfo_GetInputCount) == 230 * sizeof(void*));

struct CustomOp {
  std::uint32_t version;
  void* (*CreateKernel)(const CustomOp* op, const Api* api, const KernelInfo* info);
  const char* (*GetName)(const CustomOp* op);
  const char* (*GetExecutionProviderType)(const CustomOp* op);
  ElementType (*GetInputType)(const CustomOp* op, std::size_t index);
  std::size_t (*GetInputTypeCount)(const CustomOp* op);
  ElementType (*GetOutputType)(const CustomOp* op, std::size_t index);
  std::size_t (*GetOutputTypeCount)(const CustomOp* op);
  void (*KernelCompute)(void* kernel, KernelContext* context);
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const CustomOp* op, std::size_t index);
  Characteristic (*GetOutputCharacteristic)(const CustomOp* op, std::size_t index);
  int (*GetInputMemoryType)(const CustomOp* op, std::size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp* op);
  int (*GetVariadicInputHomogeneity)(const CustomOp* op);
  int (*GetVariadicOutputMinArity)(const CustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const CustomOp* op);
  Status* (*CreateKernelV2)(const CustomOp* op, const Api* api, const KernelInfo* info, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext* context);
  Status* (*InferOutputShapeFn)(const CustomOp* op, ShapeInferContext* context);
  int (*GetStartVersion)(const CustomOp* op);
  int (*GetEndVersion)(const CustomOp* op);
  std::size_t (*GetMayInplace)(int** input_index, int** output_index);
  void (*ReleaseMayInplace)(int* input_index, int* output_index);
  std::size_t (*GetAliasMap)(int** input_index, int** output_index);
  void (*ReleaseAliasMap)(int* input_index, int* output_index);
};

static_assert(sizeof(CustomOp) == 208 || sizeof(void*) != 8);

}  // namespace pagegraft::ort
