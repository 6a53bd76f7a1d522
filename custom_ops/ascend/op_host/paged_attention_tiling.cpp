// Tiling: reads shapes and attributes from the context and calls the tiling maths, which is plain C++.
#include <cstdio>
#include <cstring>

#include "paged_attention_host.h"
#include "paged_attention_tiling_math.h"
#include "tiling/platform/platform_ascendc.h"

namespace pagegraft {
namespace {

constexpr int64_t kMinSplitTokens = 256;   // shorter pieces cost more in merging than they win

int64_t TypeBytes(ge::DataType type) {
    switch (type) {
        case ge::DT_FLOAT: return 4;
        case ge::DT_FLOAT16:
        case ge::DT_BF16: return 2;
        case ge::DT_INT8: return 1;
        default: return 0;
    }
}

int64_t QuantOf(const char* name) {
    if (name == nullptr || std::strcmp(name, "NONE") == 0) { return kQuantNone; }
    if (std::strcmp(name, "PER_TENSOR") == 0) { return kQuantPerTensor; }
    if (std::strcmp(name, "PER_CHANNEL") == 0) { return kQuantPerChannel; }
    return -1;   // refused by the tiling maths
}

bool ReadShapes(gert::TilingContext* context, Problem& p) {
    const gert::StorageShape* query = context->GetRequiredInputShape(kInQuery);
    const gert::StorageShape* keyCache = context->GetRequiredInputShape(kInKeyCache);
    const gert::StorageShape* valueCache = context->GetOptionalInputShape(kInValueCache);
    const gert::StorageShape* past = context->GetRequiredInputShape(kInPast);
    const gert::StorageShape* table = context->GetRequiredInputShape(kInBlockTable);
    const auto* queryType = context->GetRequiredInputDesc(kInQuery);
    const auto* cacheType = context->GetRequiredInputDesc(kInKeyCache);
    if (query == nullptr || keyCache == nullptr || valueCache == nullptr || past == nullptr || table == nullptr || queryType == nullptr ||
        cacheType == nullptr) {
        return false;
    }
    const gert::Shape& keys = keyCache->GetStorageShape();
    p.numTokens = query->GetStorageShape().GetDim(0);
    p.numSeqs = past->GetStorageShape().GetDim(0);
    p.tableWidth = table->GetStorageShape().GetDim(1);
    p.numBlocks = keys.GetDim(0);
    p.blockSize = keys.GetDim(1);
    p.headSize = keys.GetDim(3);
    p.vHeadSize = valueCache->GetStorageShape().GetDim(3);
    p.inputBytes = TypeBytes(queryType->GetDataType());
    p.cacheBytes = TypeBytes(cacheType->GetDataType());
    p.packedQkv = context->GetOptionalInputShape(kInKey) == nullptr ? 1 : 0;
    p.hasSlotMapping = context->GetOptionalInputShape(kInSlotMapping) == nullptr ? 0 : 1;
    p.hasSink = context->GetOptionalInputShape(kInHeadSink) == nullptr ? 0 : 1;
    p.hasQkNorm = context->GetOptionalInputShape(kInQNorm) == nullptr ? 0 : 1;
    return true;
}

int64_t IntOf(const gert::RuntimeAttrs& attributes, size_t index, int64_t missing) {
    const int64_t* value = attributes.GetInt(index);
    return value == nullptr ? missing : *value;
}
float FloatOf(const gert::RuntimeAttrs& attributes, size_t index, float missing) {
    const float* value = attributes.GetFloat(index);
    return value == nullptr ? missing : *value;
}

void ReadAttributes(const gert::RuntimeAttrs& attributes, Problem& p) {
    p.numHeads = IntOf(attributes, kAttrNumHeads, 0);
    p.kvHeads = IntOf(attributes, kAttrKvNumHeads, 0);
    p.scale = FloatOf(attributes, kAttrScale, kAbsentScale);
    p.softcap = FloatOf(attributes, kAttrSoftcap, 0.0f);
    p.windowSize = IntOf(attributes, kAttrWindow, -1);
    p.isCausal = IntOf(attributes, kAttrCausal, 1);
    p.doRotary = IntOf(attributes, kAttrDoRotary, 0);
    p.keyQuant = QuantOf(attributes.GetStr(kAttrKQuant));
    p.valueQuant = QuantOf(attributes.GetStr(kAttrVQuant));
    const char* layout = attributes.GetStr(kAttrLayout);
    p.latent = layout != nullptr && std::strcmp(layout, "LATENT") == 0 ? 1 : 0;
    const gert::TypedContinuousVector<float>* slopes = attributes.GetListFloat(kAttrAlibi);
    p.alibiCount = slopes == nullptr ? 0 : static_cast<int64_t>(slopes->GetSize());
    p.alibiSlopes = p.alibiCount == 0 ? nullptr : slopes->GetData();
}

}  // namespace

ge::graphStatus TilePagedAttention(gert::TilingContext* context) {
    Problem problem = {};
    const gert::RuntimeAttrs* attributes = context->GetAttrs();
    if (attributes == nullptr || !ReadShapes(context, problem)) {
        std::fprintf(stderr, "PagedAttention: an input that this kernel needs is missing (value_cache is one)\n");
        return ge::GRAPH_FAILED;
    }
    ReadAttributes(*attributes, problem);
    auto platform = platform_ascendc::PlatformAscendC(context->GetPlatformInfo());
    uint64_t ubBytes = 0;
    platform.GetCoreMemSize(platform_ascendc::CoreMemType::UB, ubBytes);
    const Device device = {static_cast<int64_t>(platform.GetCoreNumAiv()), static_cast<int64_t>(ubBytes), kMinSplitTokens};
    const TilingResult result = ComputeTiling(problem, device);
    if (result.refusal != nullptr) {
        std::fprintf(stderr, "PagedAttention: %s\n", result.refusal);
        return ge::GRAPH_FAILED;
    }
    *context->GetTilingData<PagedAttentionTilingData>() = result.data;
    context->SetBlockDim(static_cast<uint32_t>(result.data.usedCores));
    context->SetScheduleMode(1);   // all cores start together: the kernel waits for all of them in SyncAll
    context->GetWorkspaceSizes(1)[0] = static_cast<size_t>(result.workspaceBytes) + platform.GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

}  // namespace pagegraft
