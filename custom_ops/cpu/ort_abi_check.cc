// Compiled only where onnxruntime's own header is on the include path: checks ort_abi.h against it, member by member.
#include "ort_abi.h"

#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>

namespace pagegraft::ort {

#define PAGEGRAFT_API(member) static_assert(offsetof(Api, member) == offsetof(OrtApi, member))
PAGEGRAFT_API(CreateStatus);
PAGEGRAFT_API(GetErrorCode);
PAGEGRAFT_API(GetErrorMessage);
PAGEGRAFT_API(CreateCustomOpDomain);
PAGEGRAFT_API(CustomOpDomain_Add);
PAGEGRAFT_API(AddCustomOpDomain);
PAGEGRAFT_API(GetTensorMutableData);
PAGEGRAFT_API(CastTypeInfoToTensorInfo);
PAGEGRAFT_API(CreateTensorTypeAndShapeInfo);
PAGEGRAFT_API(SetTensorElementType);
PAGEGRAFT_API(SetDimensions);
PAGEGRAFT_API(GetTensorElementType);
PAGEGRAFT_API(GetDimensionsCount);
PAGEGRAFT_API(GetDimensions);
PAGEGRAFT_API(GetSymbolicDimensions);
PAGEGRAFT_API(GetTensorTypeAndShape);
PAGEGRAFT_API(KernelInfoGetAttribute_float);
PAGEGRAFT_API(KernelInfoGetAttribute_int64);
PAGEGRAFT_API(KernelInfoGetAttribute_string);
PAGEGRAFT_API(KernelContext_GetInputCount);
PAGEGRAFT_API(KernelContext_GetOutputCount);
PAGEGRAFT_API(KernelContext_GetInput);
PAGEGRAFT_API(KernelContext_GetOutput);
PAGEGRAFT_API(ReleaseStatus);
PAGEGRAFT_API(ReleaseTypeInfo);
PAGEGRAFT_API(ReleaseTensorTypeAndShapeInfo);
PAGEGRAFT_API(ReleaseCustomOpDomain);
PAGEGRAFT_API(KernelInfoGetAttributeArray_float);
PAGEGRAFT_API(KernelInfo_GetInputCount);
PAGEGRAFT_API(KernelInfo_GetOutputCount);
PAGEGRAFT_API(KernelInfo_GetInputName);
PAGEGRAFT_API(KernelInfo_GetOutputName);
PAGEGRAFT_API(KernelInfo_GetInputTypeInfo);
PAGEGRAFT_API(KernelInfo_GetNodeName);
PAGEGRAFT_API(ShapeInferContext_GetInputCount);
PAGEGRAFT_API(ShapeInferContext_GetInputTypeShape);
PAGEGRAFT_API(ShapeInferContext_GetAttribute);
PAGEGRAFT_API(ShapeInferContext_SetOutputTypeShape);
PAGEGRAFT_API(SetSymbolicDimensions);
PAGEGRAFT_API(ReadOpAttr);
PAGEGRAFT_API(KernelContext_ParallelFor);
#undef PAGEGRAFT_API

#define PAGEGRAFT_OP(member) static_assert(offsetof(CustomOp, member) == offsetof(OrtCustomOp, member))
PAGEGRAFT_OP(version);
PAGEGRAFT_OP(GetName);
PAGEGRAFT_OP(GetExecutionProviderType);
PAGEGRAFT_OP(GetInputType);
PAGEGRAFT_OP(GetInputTypeCount);
PAGEGRAFT_OP(GetOutputType);
PAGEGRAFT_OP(GetOutputTypeCount);
PAGEGRAFT_OP(KernelDestroy);
PAGEGRAFT_OP(GetInputCharacteristic);
PAGEGRAFT_OP(GetOutputCharacteristic);
PAGEGRAFT_OP(GetInputMemoryType);
PAGEGRAFT_OP(GetVariadicOutputHomogeneity);
PAGEGRAFT_OP(CreateKernelV2);
PAGEGRAFT_OP(KernelComputeV2);
PAGEGRAFT_OP(InferOutputShapeFn);
PAGEGRAFT_OP(GetStartVersion);
PAGEGRAFT_OP(GetEndVersion);
PAGEGRAFT_OP(GetMayInplace);
PAGEGRAFT_OP(ReleaseMayInplace);
PAGEGRAFT_OP(GetAliasMap);
PAGEGRAFT_OP(ReleaseAliasMap);
#undef PAGEGRAFT_OP

static_assert(sizeof(CustomOp) == sizeof(OrtCustomOp));
static_assert(static_cast<int>(kFloat) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
static_assert(static_cast<int>(kUint8) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
static_assert(static_cast<int>(kInt8) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8);
static_assert(static_cast<int>(kInt32) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
static_assert(static_cast<int>(kFloat16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
static_assert(static_cast<int>(kBFloat16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
static_assert(static_cast<int>(kFloat8E4M3FN) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN);
static_assert(static_cast<int>(kInvalidArgument) == ORT_INVALID_ARGUMENT);
static_assert(static_cast<int>(kFail) == ORT_FAIL);
static_assert(static_cast<int>(kOptional) == INPUT_OUTPUT_OPTIONAL);
static_assert(static_cast<int>(kAttrInt) == ORT_OP_ATTR_INT);
static_assert(static_cast<int>(kAttrString) == ORT_OP_ATTR_STRING);

}  // namespace pagegraft::ort
#endif
