// The work of a step, enumerated the same way by every core: query tiles, each times (KV head, head chunk, KV split).
#pragma once
#include "pa_common.h"

namespace pagegraft {

// Consecutive new tokens of one sequence and the KV positions that they can see.
struct QueryTile {
    int32_t sequence, firstToken, tokens;
    int64_t firstPosition, total;   // absolute position of the first token; length after this step
    int64_t low, high;              // positions that the tile can see
    int32_t splits;
    int64_t firstPartial;           // workspace slot of (head task 0, split 0); used when splits > 1
};

// Rows of a unit: tokens x heads, token-major, from row firstRow of the tile on. Head h of the unit is query head
// firstHead + h.
struct Unit {
    int32_t kvHead, firstHead, heads, firstRow, rows;
    __aicore__ inline int32_t Token(int32_t row) const { return (firstRow + row) / heads; }
    __aicore__ inline int32_t Head(int32_t row) const { return firstHead + (firstRow + row) % heads; }
};

class TileWalk {
public:
    __aicore__ inline void Init(const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        tiling_ = tiling;
        sequences_.Init(tiling, at);
        ChooseSplit();
    }

    __aicore__ inline void Restart() {
        sequence_ = -1;
        next_ = end_ = 0;
        partials_ = 0;
    }

    __aicore__ inline bool Next(QueryTile& tile) {
        while (next_ >= end_) {
            if (++sequence_ >= tiling_->numSeqs) { return false; }
            current_ = sequences_.Get(sequence_);
            next_ = current_.begin;
            end_ = current_.end;
        }
        tile.sequence = sequence_;
        tile.firstToken = next_;
        tile.tokens = static_cast<int32_t>(Smaller(tiling_->tokensPerTile, end_ - next_));
        tile.firstPosition = current_.past + (next_ - current_.begin);
        tile.total = current_.total;
        SetRange(tile);
        next_ += tile.tokens;
        tile.splits = static_cast<int32_t>(Larger(1, CeilDiv(tile.high - tile.low, splitTokens_)));
        tile.firstPartial = partials_;
        if (tile.splits > 1) { partials_ += static_cast<int64_t>(HeadTasks()) * tile.splits; }
        return true;
    }

    __aicore__ inline int32_t HeadTasks() const { return tiling_->kvHeads * tiling_->chunksPerGroup; }
    __aicore__ inline int64_t SplitTokens() const { return splitTokens_; }
    // True after a whole walk in which some tile was split.
    __aicore__ inline bool AnySplit() const { return partials_ > 0; }

private:
    __aicore__ inline void SetRange(QueryTile& tile) const {
        tile.low = tile.high = 0;
        if (!current_.valid) { return; }
        tile.high = tiling_->isCausal != 0 ? tile.firstPosition + tile.tokens : tile.total;
        if (tiling_->windowSize > 0) {
            tile.low = Smaller(Larger(0, tile.firstPosition - tiling_->windowSize + 1), tile.high);
        }
    }

    // Long contexts are cut so that all cores have work; the length of a cut is the same for the whole step.
    __aicore__ inline void ChooseSplit() {
        splitTokens_ = int64_t(1) << 40;
        if (tiling_->maxSplits <= 1) { return; }
        int64_t longest = 0;
        for (int32_t s = 0; s < tiling_->numSeqs; ++s) {
            const Sequence sequence = sequences_.Get(s);
            if (!sequence.valid) { continue; }
            int64_t visible = sequence.total;
            if (tiling_->windowSize > 0) {
                visible = Smaller(visible, static_cast<int64_t>(tiling_->windowSize) + (sequence.end - sequence.begin));
            }
            longest = Larger(longest, visible);
        }
        splitTokens_ = Larger(tiling_->minSplitTokens, CeilDiv(CeilDiv(longest, tiling_->maxSplits), kLanes) * kLanes);
    }

    const PagedAttentionTilingData* tiling_ = nullptr;
    Sequences sequences_;
    Sequence current_;
    int32_t sequence_ = -1, next_ = 0, end_ = 0;
    int64_t splitTokens_ = 0, partials_ = 0;
};

}  // namespace pagegraft
