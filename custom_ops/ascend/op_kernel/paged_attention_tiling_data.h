// What the host hands to the kernel: a plain struct, shared by op_host, the kernel and the emulator.
//
// Shape letters: T packed new tokens, S sequences, N blocks, B block size, M block-table width, H query heads,
// G key/value heads, D key head size, Dv value head size. Sizes ending in `Bytes` are UB buffer sizes of one core.
#ifndef PAGEGRAFT_PAGED_ATTENTION_TILING_DATA_H
#define PAGEGRAFT_PAGED_ATTENTION_TILING_DATA_H

#include <cstdint>

namespace pagegraft {

constexpr int32_t kLanes = 64;            // float lanes of one vector repeat; a tile of KV positions has at most as many,
constexpr int32_t kMaxRows = 32;          // (token, head) rows that share a KV tile
constexpr int32_t kScratchFloats = 8192;  // and at most so many elements (positions * head size)
constexpr int32_t kMaxBatch = 4;          // rows whose instructions are interleaved between two barriers
constexpr int32_t kWriteChunk = 4096;     // elements of a token's key or value row that the cache writer handles at once
constexpr int32_t kMaxAlibiHeads = 128;

// The operator's attributes cannot be absent: this value of `scale`, whose scores would overflow, says that none is given.
constexpr float kAbsentScale = 3e38f;

// How a cache is quantised; the values of k_quant_type and v_quant_type.
enum QuantKind : int32_t { kQuantNone = 0, kQuantPerTensor = 1, kQuantPerChannel = 2 };

struct PagedAttentionTilingData {
    int32_t numTokens, numSeqs, numBlocks, blockSize, tableWidth;
    int32_t numHeads, kvHeads, headSize, vHeadSize;
    int32_t chunksPerGroup;   // query heads of one KV head are cut into this many chunks
    int32_t headsPerChunk;
    int32_t tokensPerTile;    // new tokens whose rows share a KV tile
    int32_t tileTokens;       // KV positions of a tile
    int32_t keyPitch, valuePitch;              // elements between rows of a tile in UB
    int32_t queryStride, keyStride, valueStride;  // elements between tokens in GM
    int32_t keyOffset, valueOffset;            // elements from a token's start (packed QKV)
    int32_t isCausal, windowSize;              // windowSize 0: no window
    int32_t hasSlotMapping, hasSink, hasAlibi;
    int32_t keyQuant, valueQuant;              // QuantKind
    int32_t maxSplits, minSplitTokens;
    int32_t usedCores;
    int32_t kvBytes, wideBytes, scratchBytes, queryInBytes, queryBytes, accBytes, outBytes, scoreBytes, broadcastBytes;
    float scale, softcap;                      // softcap 0: none
    float alibiSlopes[kMaxAlibiHeads];
};

// Floats of one partial result in the workspace: accumulators, then kMaxRows maxima and kMaxRows sums.
constexpr int64_t PartialFloats(int32_t vHeadSize, int32_t rows) {
    return static_cast<int64_t>(rows) * vHeadSize + 2 * kMaxRows;
}

// Bytes of workspace that a group of the mixed kernel exchanges through: two buffers of scores (float) and weights, one
// of products (float), for twice kMaxRows rows.
constexpr int64_t CubeExchangeBytes(int32_t vHeadSize, int64_t elementBytes) {
    return 2 * kMaxRows * (2 * kLanes * (4 + elementBytes) + static_cast<int64_t>(vHeadSize) * 4);
}

}  // namespace pagegraft

#endif
