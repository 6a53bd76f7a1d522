// Indices of the operator's inputs, outputs and attributes, and the host functions that its definition names.
#pragma once
#include "register/op_def_registry.h"

namespace pagegraft {

enum InputIndex : size_t {
    kInQuery, kInKey, kInValue, kInKeyCache, kInValueCache, kInCumulative, kInPast, kInBlockTable, kInCos, kInSin, kInSlotMapping,
    kInHeadSink, kInQNorm, kInKNorm, kInKScale, kInVScale, kInMetadata
};
enum OutputIndex : size_t { kOutOutput, kOutKeyCache, kOutValueCache };
enum AttributeIndex : size_t {
    kAttrNumHeads, kAttrKvNumHeads, kAttrScale, kAttrSoftcap, kAttrWindow, kAttrCausal, kAttrDoRotary, kAttrRotaryInterleaved,
    kAttrRotaryOffset, kAttrNormEpsilon, kAttrKQuant, kAttrVQuant, kAttrKCacheType, kAttrVCacheType, kAttrLayout, kAttrVHeadSize,
    kAttrAlibi
};

ge::graphStatus InferPagedAttentionShape(gert::InferShapeContext* context);
ge::graphStatus InferPagedAttentionDataType(gert::InferDataTypeContext* context);
ge::graphStatus TilePagedAttention(gert::TilingContext* context);

}  // namespace pagegraft
