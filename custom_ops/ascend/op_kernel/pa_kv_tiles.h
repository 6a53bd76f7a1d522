// Gathers KV tiles through the block table and widens them to float.
#pragma once
#include "pa_common.h"

namespace pagegraft {

// Up to tileTokens consecutive mapped positions, as pieces of blocks.
struct KvTile {
    int64_t start;
    int32_t count, pieces;
    int64_t slot[kLanes];
    int32_t length[kLanes];
};

class KvTileFinder {
public:
    __aicore__ inline void Init(const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        tiling_ = tiling;
        blockTable_.SetGlobalBuffer((__gm__ int32_t*)at.blockTable, static_cast<uint64_t>(tiling->numSeqs) * tiling->tableWidth);
    }

    // The first tile at or after `position`, before `end`. Unmapped and impossible block ids end a tile and are skipped.
    __aicore__ inline bool Find(int32_t sequence, int64_t position, int64_t end, KvTile& tile) const {
        const int32_t size = tiling_->blockSize;
        const int64_t row = static_cast<int64_t>(sequence) * tiling_->tableWidth;
        tile.count = tile.pieces = 0;
        while (position < end && tile.count < tiling_->tileTokens) {
            const int32_t offset = static_cast<int32_t>(position % size);
            const int64_t block = blockTable_.GetValue(row + position / size);
            if (block < 0 || block >= tiling_->numBlocks) {
                if (tile.count > 0) { break; }
                position += size - offset;
                continue;
            }
            if (tile.count == 0) { tile.start = position; }
            const int32_t take = static_cast<int32_t>(Smaller(Smaller(size - offset, tiling_->tileTokens - tile.count), end - position));
            tile.slot[tile.pieces] = block * size + offset;
            tile.length[tile.pieces] = take;
            ++tile.pieces;
            tile.count += take;
            position += take;
        }
        return tile.count > 0;
    }

private:
    const PagedAttentionTilingData* tiling_ = nullptr;
    GlobalTensor<int32_t> blockTable_;
};

template <typename C>
class KvTileReader {
public:
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        tiling_ = tiling;
        const uint64_t slots = static_cast<uint64_t>(tiling->numBlocks) * tiling->blockSize * tiling->kvHeads;
        keys_.SetGlobalBuffer((__gm__ C*)at.keyCache, slots * tiling->headSize);
        values_.SetGlobalBuffer((__gm__ C*)at.valueCache, slots * tiling->vHeadSize);
        finder_.Init(tiling, at);
        pipe->InitBuffer(queue_, 2, tiling->kvBytes);
        pipe->InitBuffer(wide_, tiling->wideBytes);
    }

    __aicore__ inline bool Find(int32_t sequence, int64_t position, int64_t end, KvTile& tile) const {
        return finder_.Find(sequence, position, end, tile);
    }

    __aicore__ inline void FetchKeys(const KvTile& tile, int32_t head) { Fetch(keys_, tile, head, tiling_->headSize, tiling_->keyPitch); }
    __aicore__ inline void FetchValues(const KvTile& tile, int32_t head) { Fetch(values_, tile, head, tiling_->vHeadSize, tiling_->valuePitch); }

    // Waits for the oldest fetched tile and widens it; `scratch` is clobbered for int8.
    __aicore__ inline LocalTensor<float> Take(int32_t count, const LocalTensor<float>& scratch) {
        LocalTensor<float> wide = wide_.Get<float>();
        LocalTensor<C> raw = queue_.template DeQue<C>();
        PipeBarrier<PIPE_V>();
        if constexpr (Same<C, int8_t>::value) {
            LocalTensor<half> codes = scratch.template ReinterpretCast<half>();
            Cast(codes, raw, RoundMode::CAST_NONE, count);
            queue_.FreeTensor(raw);
            PipeBarrier<PIPE_V>();
            Cast(wide, codes, RoundMode::CAST_NONE, count);
        } else {
            Widen(wide, raw, count);
            queue_.FreeTensor(raw);
        }
        PipeBarrier<PIPE_V>();
        return wide;
    }

    // Partial results of the combine pass come in through the same two buffers.
    __aicore__ inline void FetchPartial(const GlobalTensor<float>& partial, int32_t accumulators, int32_t capacity) {
        LocalTensor<float> in = queue_.template AllocTensor<float>();
        DataCopy(in, partial, accumulators);
        DataCopy(in[capacity], partial[capacity], 2 * kMaxRows);
        queue_.EnQue(in);
    }
    __aicore__ inline LocalTensor<float> TakePartial() { return queue_.template DeQue<float>(); }
    __aicore__ inline void FreePartial(const LocalTensor<float>& partial) { queue_.FreeTensor(partial); }

private:
    __aicore__ inline void Fetch(const GlobalTensor<C>& cache, const KvTile& tile, int32_t head, int32_t width, int32_t pitch) {
        LocalTensor<C> in = queue_.template AllocTensor<C>();
        const int64_t slotElements = static_cast<int64_t>(tiling_->kvHeads) * width;
        const int64_t rowBytes = width * static_cast<int64_t>(sizeof(C));
        const int64_t gapBytes = slotElements * static_cast<int64_t>(sizeof(C)) - rowBytes;
        const bool wholeBlocks = rowBytes % 32 == 0 && gapBytes / 32 <= 65535;
        int32_t row = 0;
        for (int32_t i = 0; i < tile.pieces; ++i) {
            const uint64_t from = static_cast<uint64_t>(tile.slot[i] * slotElements + static_cast<int64_t>(head) * width);
            if (wholeBlocks) {
                DataCopy(in[row * pitch], cache[from], DataCopyParams(tile.length[i], rowBytes / 32, gapBytes / 32, 0));
            } else {
                DataCopyPad(in[row * pitch], cache[from], DataCopyExtParams(tile.length[i], rowBytes, gapBytes, 0, 0),
                            DataCopyPadExtParams<C>());
            }
            row += tile.length[i];
        }
        queue_.EnQue(in);
    }

    const PagedAttentionTilingData* tiling_ = nullptr;
    GlobalTensor<C> keys_, values_;
    KvTileFinder finder_;
    TQue<TPosition::VECIN, 1> queue_;
    TBuf<TPosition::VECCALC> wide_;
};

}  // namespace pagegraft
