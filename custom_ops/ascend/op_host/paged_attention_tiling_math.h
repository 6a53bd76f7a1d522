// From the shapes and attributes of a PagedAttention node to the kernel's tiling: plain C++, no CANN header.
// op_host, the emulator's driver and the tests call the same function.
#ifndef PAGEGRAFT_PAGED_ATTENTION_TILING_MATH_H
#define PAGEGRAFT_PAGED_ATTENTION_TILING_MATH_H

#include <cmath>
#include <cstdint>

#include "../op_kernel/paged_attention_tiling_data.h"

namespace pagegraft {

// A node with its shapes, as far as the kernel depends on them. Letters as in paged_attention_tiling_data.h.
struct Problem {
    int64_t numTokens, numSeqs, numBlocks, blockSize, tableWidth;   // T, S, N, B, M
    int64_t numHeads, kvHeads, headSize, vHeadSize;                 // H, G, D, Dv
    int64_t packedQkv;        // key and value come inside query
    int64_t inputBytes;       // bytes of an element of query, key, value and output: 2 or 4
    int64_t cacheBytes;       // of a cache element: 1 (int8), or as the query
    int64_t hasSlotMapping, hasSink;
    int64_t keyQuant, valueQuant;   // QuantKind
    int64_t isCausal, windowSize;   // window -1: none
    int64_t doRotary, hasQkNorm, latent;   // refused
    float scale, softcap;     // scale kAbsentScale: 1/sqrt(D)
    int64_t alibiCount;
    const float* alibiSlopes;
};

struct Device {
    int64_t vectorCores;
    int64_t ubBytes;
    int64_t minSplitTokens;   // KV positions below which a context is not cut further
};

struct TilingResult {
    const char* refusal;      // null: the kernel runs this problem; otherwise why not, with what to do
    int64_t workspaceBytes;
    int64_t ubUsedBytes;      // of the phase that needs more
    PagedAttentionTilingData data;
};

namespace tiling_detail {

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundTo(int64_t a, int64_t b) { return CeilDivide(a, b) * b; }
constexpr int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Most(int64_t a, int64_t b) { return a > b ? a : b; }

inline const char* RefuseHeads(const Problem& p) {
    if (p.headSize < 16 || p.headSize > 256 || p.headSize % 16 != 0) { return "head_size must be a multiple of 16 between 16 and 256"; }
    if (p.vHeadSize < 16 || p.vHeadSize > 256 || p.vHeadSize % 16 != 0) { return "v_head_size must be a multiple of 16 between 16 and 256"; }
    if (p.kvHeads < 1 || p.numHeads < 1 || p.numHeads % p.kvHeads != 0) { return "kv_num_heads must divide num_heads"; }
    if ((p.numHeads + 2 * p.kvHeads) * Most(p.headSize, p.vHeadSize) > 65535 * 16) { return "a token's packed heads must not exceed 1048560 elements"; }
    if (p.alibiCount != 0 && p.alibiCount != p.numHeads) { return "alibi_slopes must have num_heads values"; }
    if (p.alibiCount > kMaxAlibiHeads) { return "alibi_slopes is limited to 128 heads"; }
    return nullptr;
}

inline const char* RefuseShapes(const Problem& p) {
    if (p.blockSize < 1 || p.blockSize > 512 || (p.blockSize & (p.blockSize - 1)) != 0) { return "block_size must be a power of two up to 512"; }
    if (p.numTokens < 0 || p.numSeqs < 0 || p.numBlocks < 1 || p.tableWidth < 1) { return "a dimension of the inputs is empty"; }
    constexpr int64_t kInt32 = 0x7FFFFFFF;
    if (p.numTokens > kInt32 || p.numBlocks > kInt32 / p.blockSize) { return "token counts and slots must fit in 31 bits"; }
    if (p.tableWidth * p.blockSize > kInt32) { return "a context must fit in 31 bits"; }
    return nullptr;
}

inline const char* RefuseFeatures(const Problem& p) {
    if (p.latent != 0) { return "kv_cache_layout=LATENT is not supported on Ascend; use a SEPARATE model"; }
    if (p.doRotary != 0) { return "do_rotary=1 is not supported on Ascend; convert with rotary embedding left in the graph"; }
    if (p.hasQkNorm != 0) { return "q/k norm weights are not supported on Ascend; convert with the norms left in the graph"; }
    const bool int8 = p.cacheBytes == 1;
    const int64_t quants[] = {p.keyQuant, p.valueQuant};
    for (const int64_t quant : quants) {
        if (int8 != (quant == kQuantPerTensor || quant == kQuantPerChannel)) {
            return "int8 caches need k_quant_type and v_quant_type PER_TENSOR or PER_CHANNEL, other caches NONE";
        }
    }
    if (!int8 && p.cacheBytes != p.inputBytes) { return "caches must be of the query's type or int8"; }
    if (p.inputBytes != 2 && p.inputBytes != 4) { return "query must be float16, bfloat16 or float32"; }
    return nullptr;
}

inline void FillHeads(const Problem& p, PagedAttentionTilingData& d) {
    const int64_t widest = Most(p.headSize, p.vHeadSize);
    const int64_t rows = widest <= 128 ? kMaxRows : kMaxRows / 2;
    const int64_t group = p.numHeads / p.kvHeads;
    const int64_t perBlock = 32 / p.cacheBytes;
    d.keyPitch = static_cast<int32_t>(RoundTo(p.headSize, perBlock));
    d.valuePitch = static_cast<int32_t>(RoundTo(p.vHeadSize, perBlock));
    d.chunksPerGroup = static_cast<int32_t>(CeilDivide(group, rows));
    d.headsPerChunk = static_cast<int32_t>(CeilDivide(group, d.chunksPerGroup));
    d.tokensPerTile = static_cast<int32_t>(Most(1, rows / d.headsPerChunk));
    const int64_t pitch = Most(d.keyPitch, d.valuePitch);
    // Half as many for float: its two buffers of KV take twice the bytes.
    const int64_t elements = p.inputBytes == 4 ? kScratchFloats / 2 : kScratchFloats;
    d.tileTokens = static_cast<int32_t>(Least(kLanes, elements / pitch / 8 * 8));
}

inline void FillStrides(const Problem& p, PagedAttentionTilingData& d) {
    const int64_t query = p.numHeads * p.headSize, key = p.kvHeads * p.headSize, value = p.kvHeads * p.vHeadSize;
    const int64_t packed = query + key + value;
    d.queryStride = static_cast<int32_t>(p.packedQkv != 0 ? packed : query);
    d.keyStride = static_cast<int32_t>(p.packedQkv != 0 ? packed : key);
    d.valueStride = static_cast<int32_t>(p.packedQkv != 0 ? packed : value);
    d.keyOffset = static_cast<int32_t>(p.packedQkv != 0 ? query : 0);
    d.valueOffset = static_cast<int32_t>(p.packedQkv != 0 ? query + key : 0);
}

inline void FillBuffers(const Problem& p, PagedAttentionTilingData& d) {
    const int64_t rows = static_cast<int64_t>(d.tokensPerTile) * d.headsPerChunk;
    const int64_t partial = PartialFloats(d.vHeadSize, static_cast<int32_t>(rows)) * 4;
    const int64_t tile = static_cast<int64_t>(d.tileTokens) * Most(d.keyPitch, d.valuePitch);
    d.kvBytes = static_cast<int32_t>(Most(tile * p.cacheBytes, partial));
    d.wideBytes = static_cast<int32_t>(tile * 4);
    d.scratchBytes = kScratchFloats * 4;
    d.queryInBytes = static_cast<int32_t>(Most(rows * d.headSize * p.inputBytes, Most(d.headSize, d.vHeadSize) * 4));
    d.queryBytes = static_cast<int32_t>(rows * d.headSize * 4);
    d.accBytes = static_cast<int32_t>(rows * d.vHeadSize * 4);
    d.outBytes = static_cast<int32_t>(partial);
    d.scoreBytes = static_cast<int32_t>(rows * kLanes * 4);
    d.broadcastBytes = kMaxBatch * kLanes * 32;
}

// How many ways a context may be cut. Few tiles: as many as keep two units a core. Bounds the workspace.
inline int64_t FillSplits(const Problem& p, const Device& device, PagedAttentionTilingData& d) {
    const int64_t tiles = p.numTokens / d.tokensPerTile + p.numSeqs;
    const int64_t units = Most(1, tiles * p.kvHeads * d.chunksPerGroup);
    const int64_t splits = Most(1, Least(16, CeilDivide(2 * device.vectorCores, units)));
    d.maxSplits = static_cast<int32_t>(splits);
    d.minSplitTokens = static_cast<int32_t>(Most(kLanes, RoundTo(device.minSplitTokens, kLanes)));
    d.usedCores = static_cast<int32_t>(Most(1, Least(device.vectorCores, Most(p.numTokens, units * splits))));
    if (splits == 1) { return 0; }
    return units * splits * PartialFloats(d.vHeadSize, d.tokensPerTile * d.headsPerChunk) * 4;
}

}  // namespace tiling_detail

// UB bytes of the attention phase: the buffers that Attention::Init and its parts ask for.
inline int64_t AttentionUbBytes(const PagedAttentionTilingData& d) {
    const int64_t statistics = 5 * kMaxRows * 4, factors = 2 * kMaxRows * 32, ramp = kLanes * 4, sink = kMaxRows * 4;
    return 2 * static_cast<int64_t>(d.kvBytes) + d.wideBytes + d.scratchBytes + d.queryInBytes + d.queryBytes + d.accBytes + d.outBytes +
           d.scoreBytes + d.broadcastBytes + statistics + factors + ramp + sink;
}

// UB bytes of the cache-writing phase.
inline int64_t WriterUbBytes(const Problem& p) {
    const int64_t chunk = kWriteChunk;
    if (p.cacheBytes == 1) { return 2 * chunk * p.inputBytes + 2 * chunk + chunk * 4 + chunk * 4 + chunk * 4 + chunk * 2; }
    return 2 * chunk * p.inputBytes;
}

inline TilingResult ComputeTiling(const Problem& p, const Device& device) {
    using namespace tiling_detail;
    TilingResult r = {};
    r.refusal = RefuseHeads(p);
    if (r.refusal == nullptr) { r.refusal = RefuseShapes(p); }
    if (r.refusal == nullptr) { r.refusal = RefuseFeatures(p); }
    if (r.refusal != nullptr) { return r; }
    PagedAttentionTilingData& d = r.data;
    d.numTokens = static_cast<int32_t>(p.numTokens);
    d.numSeqs = static_cast<int32_t>(p.numSeqs);
    d.numBlocks = static_cast<int32_t>(p.numBlocks);
    d.blockSize = static_cast<int32_t>(p.blockSize);
    d.tableWidth = static_cast<int32_t>(p.tableWidth);
    d.numHeads = static_cast<int32_t>(p.numHeads);
    d.kvHeads = static_cast<int32_t>(p.kvHeads);
    d.headSize = static_cast<int32_t>(p.headSize);
    d.vHeadSize = static_cast<int32_t>(p.vHeadSize);
    d.isCausal = p.isCausal != 0 ? 1 : 0;
    d.windowSize = p.windowSize > 0 ? static_cast<int32_t>(Least(p.windowSize, 0x7FFFFFFF)) : 0;
    d.hasSlotMapping = p.hasSlotMapping != 0 ? 1 : 0;
    d.hasSink = p.hasSink != 0 ? 1 : 0;
    d.keyQuant = static_cast<int32_t>(p.keyQuant);
    d.valueQuant = static_cast<int32_t>(p.valueQuant);
    // Above half of it, so that the value may pass through text with few digits.
    d.scale = p.scale < kAbsentScale / 2 ? p.scale : 1.0f / std::sqrt(static_cast<float>(p.headSize));
    d.softcap = p.softcap;
    d.hasAlibi = p.alibiCount != 0 ? 1 : 0;
    for (int64_t h = 0; h < p.alibiCount; ++h) { d.alibiSlopes[h] = p.alibiSlopes[h]; }
    FillHeads(p, d);
    FillStrides(p, d);
    FillBuffers(p, d);
    r.workspaceBytes = FillSplits(p, device, d);
    r.ubUsedBytes = Most(AttentionUbBytes(d), WriterUbBytes(p));
    if (r.ubUsedBytes > device.ubBytes) { r.refusal = "the tiling does not fit this device's unified buffer"; }
    return r;
}

// Tiling of the mixed kernel (paged_attention_cube.cpp): 64 rows a unit, two vector cores and a cube core a group.
inline TilingResult ComputeCubeTiling(const Problem& p, const Device& device) {
    TilingResult r = ComputeTiling(p, device);
    if (r.refusal != nullptr) { return r; }
    if (p.inputBytes != 2 || p.cacheBytes != 2) {
        r.refusal = "the cube path needs float16 or bfloat16 query and caches";
        return r;
    }
    PagedAttentionTilingData& d = r.data;
    const int64_t rows = 2 * kMaxRows, group = p.numHeads / p.kvHeads;
    d.chunksPerGroup = static_cast<int32_t>(tiling_detail::CeilDivide(group, rows));
    d.headsPerChunk = static_cast<int32_t>(tiling_detail::CeilDivide(group, d.chunksPerGroup));
    d.tokensPerTile = static_cast<int32_t>(tiling_detail::Most(1, rows / d.headsPerChunk));
    d.tileTokens = kLanes;
    d.accBytes = kMaxRows * d.vHeadSize * 4;
    d.scoreBytes = kMaxRows * kLanes * 4;
    d.scratchBytes = kMaxRows * kLanes * 4;
    d.maxSplits = 1;
    const int64_t tiles = p.numTokens / d.tokensPerTile + p.numSeqs;
    const int64_t units = tiling_detail::Most(1, tiles * p.kvHeads * d.chunksPerGroup);
    d.usedCores = static_cast<int32_t>(tiling_detail::Most(1, tiling_detail::Least(device.vectorCores / 2, units)));   // groups
    r.workspaceBytes = d.usedCores * CubeExchangeBytes(d.vHeadSize, p.inputBytes);
    const int64_t wide = tiling_detail::Most(d.vHeadSize, kLanes) * kMaxRows;
    const int64_t fixed = 5 * kMaxRows * 4 + 2 * kMaxRows * 32 + kLanes * 4 + kMaxRows * 32;
    r.ubUsedBytes = d.accBytes + d.scoreBytes + d.scratchBytes + d.broadcastBytes + 2 * wide * 4 + wide * p.inputBytes + fixed;
    if (r.ubUsedBytes > device.ubBytes) { r.refusal = "the tiling does not fit this device's unified buffer"; }
    return r;
}

}  // namespace pagegraft

#endif
