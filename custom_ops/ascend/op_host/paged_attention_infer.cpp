// Output shapes and types: output is [T, H * Dv], the cache outputs are the cache inputs.
#include "paged_attention_host.h"

namespace pagegraft {

ge::graphStatus InferPagedAttentionShape(gert::InferShapeContext* context) {
    const gert::Shape* query = context->GetRequiredInputShape(kInQuery);
    const gert::Shape* keyCache = context->GetRequiredInputShape(kInKeyCache);
    const gert::Shape* valueCache = context->GetOptionalInputShape(kInValueCache);
    const gert::RuntimeAttrs* attributes = context->GetAttrs();
    if (query == nullptr || keyCache == nullptr || valueCache == nullptr || attributes == nullptr) { return ge::GRAPH_FAILED; }
    const int64_t* heads = attributes->GetInt(kAttrNumHeads);
    if (heads == nullptr || query->GetDimNum() != 2 || keyCache->GetDimNum() != 4 || valueCache->GetDimNum() != 4) {
        return ge::GRAPH_FAILED;
    }
    gert::Shape* output = context->GetOutputShape(kOutOutput);
    const int64_t width = valueCache->GetDim(3);
    output->SetDimNum(2);
    output->SetDim(0, query->GetDim(0));
    output->SetDim(1, width < 0 ? -1 : *heads * width);   // -1: not known when the graph is compiled
    *context->GetOutputShape(kOutKeyCache) = *keyCache;
    *context->GetOutputShape(kOutValueCache) = *valueCache;
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus InferPagedAttentionDataType(gert::InferDataTypeContext* context) {
    const ge::DataType cache = context->GetRequiredInputDataType(kInKeyCache);
    context->SetOutputDataType(kOutOutput, context->GetRequiredInputDataType(kInQuery));
    context->SetOutputDataType(kOutKeyCache, cache);
    context->SetOutputDataType(kOutValueCache, cache);
    return ge::GRAPH_SUCCESS;
}

}  // namespace pagegraft
