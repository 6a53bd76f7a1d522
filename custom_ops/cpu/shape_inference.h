// Output shapes for onnxruntime's graph; see shape_inference.cc.
#pragma once

#include "contract.h"
#include "ort_abi.h"

namespace pagegraft {

void infer_output_shapes(const ort::Api* api, ort::ShapeInferContext* context);

}  // namespace pagegraft
