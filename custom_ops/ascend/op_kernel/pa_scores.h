// Scores of a tile's rows against a KV tile, and the weighted sum of its values, on the vector unit.
#pragma once
#include "pa_kv_tiles.h"
#include "pa_row_state.h"
#include "pa_work.h"

namespace pagegraft {

// Which positions of the tile a row sees: [first, first + count).
struct RowSpan {
    int32_t first, count;
};

class TileMath {
public:
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling) {
        tiling_ = tiling;
        pipe->InitBuffer(scoreBuffer_, tiling->scoreBytes);
        pipe->InitBuffer(scratchBuffer_, tiling->scratchBytes);
        pipe->InitBuffer(weightBuffer_, tiling->broadcastBytes);
        pipe->InitBuffer(ramp_, kLanes * sizeof(float));
        scores_ = scoreBuffer_.Get<float>();
        scratch_ = scratchBuffer_.Get<float>();
        weights_ = weightBuffer_.Get<float>();
        if (tiling->hasAlibi != 0) { FillRamp(pipe); }
    }

    __aicore__ inline const LocalTensor<float>& Scores() const { return scores_; }
    __aicore__ inline const LocalTensor<float>& Scratch() const { return scratch_; }
    // scores[row, first..first+count) = q[row] . k[position]; every other score is 0.
    __aicore__ inline void Dot(const LocalTensor<float>& query, const LocalTensor<float>& keys, int32_t rows) {
        Duplicate(scores_, 0.0f, rows * kLanes);
        const int32_t region = tiling_->tileTokens * kLanes;
        const int32_t batch = static_cast<int32_t>(Smaller(kMaxBatch, kScratchFloats / region));
        for (int32_t r = 0; r < rows; r += batch) {
            DotBatch(query, keys, r, static_cast<int32_t>(Smaller(batch, rows - r)), region);
        }
    }

    // The heads of a token see the same positions: worked out once a token, for the scalar unit is slow.
    __aicore__ inline void SetSpans(const QueryTile& tile, const Unit& unit, const KvTile& kv) {
        int32_t token = unit.Token(0), left = unit.heads - unit.firstRow % unit.heads;
        RowSpan span = SpanOf(tile, token, kv);
        for (int32_t r = 0; r < unit.rows; ++r, --left) {
            if (left == 0) {
                left = unit.heads;
                span = SpanOf(tile, ++token, kv);
            }
            spans_[r] = span;
        }
    }

    // Everything between q.k and the softmax, in the contract's order: ALiBi, softcap, mask.
    __aicore__ inline void Shape(const QueryTile& tile, const Unit& unit, const KvTile& kv) {
        if (tiling_->hasAlibi != 0) { AddBias(tile, unit, kv); }
        if (tiling_->softcap > 0.0f) { Softcap(tiling_->softcap, unit.rows); }
        Mask(unit.rows);
    }

    // accumulator[row] += sum over the row's positions of score * value.
    __aicore__ inline void Accumulate(RowState& state, const LocalTensor<float>& values, int32_t rows) {
        const int32_t region = tiling_->tileTokens * tiling_->vHeadSize;
        const int32_t batch = static_cast<int32_t>(Smaller(kMaxBatch, kScratchFloats / region));
        for (int32_t r = 0; r < rows; r += batch) {
            AccumulateBatch(state, values, r, static_cast<int32_t>(Smaller(batch, rows - r)), region);
        }
    }

private:
    __aicore__ inline RowSpan SpanOf(const QueryTile& tile, int32_t token, const KvTile& kv) const {
        const int64_t position = tile.firstPosition + token;
        const int64_t low = tiling_->windowSize > 0 ? position - tiling_->windowSize + 1 : 0;
        const int64_t high = tiling_->isCausal != 0 ? position + 1 : tile.total;
        const int64_t first = Smaller(Larger(low - kv.start, 0), kv.count);
        const int64_t last = Smaller(Larger(high - kv.start, first), kv.count);
        RowSpan span;
        span.first = last > first ? static_cast<int32_t>(first) : 0;
        span.count = static_cast<int32_t>(last - first);
        return span;
    }

    // score += slope * (position - row position).
    __aicore__ inline void AddBias(const QueryTile& tile, const Unit& unit, const KvTile& kv) {
        const LocalTensor<float> ramp = ramp_.Get<float>();
        for (int32_t r = 0; r < unit.rows; ++r) { Axpy(scores_[r * kLanes], ramp, tiling_->alibiSlopes[unit.Head(r)], kLanes); }
        PipeBarrier<PIPE_V>();
        for (int32_t r = 0; r < unit.rows; ++r) {
            const float distance = static_cast<float>(kv.start - (tile.firstPosition + unit.Token(r)));
            const LocalTensor<float> row = scores_[r * kLanes];
            Adds(row, row, tiling_->alibiSlopes[unit.Head(r)] * distance, kLanes);
        }
        PipeBarrier<PIPE_V>();
    }

    // cap * tanh(score / cap), as cap - 2 cap / (exp(2 score / cap) + 1): exp may overflow to infinity without harm.
    __aicore__ inline void Softcap(float cap, int32_t rows) {
        const int32_t count = rows * kLanes;
        Muls(scores_, scores_, 2.0f / cap, count);
        Duplicate(scratch_, -2.0f * cap, count);
        PipeBarrier<PIPE_V>();
        Exp(scores_, scores_, count);
        PipeBarrier<PIPE_V>();
        Adds(scores_, scores_, 1.0f, count);
        PipeBarrier<PIPE_V>();
        Div(scores_, scratch_, scores_, count);
        PipeBarrier<PIPE_V>();
        Adds(scores_, scores_, cap, count);
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Mask(int32_t rows) {
        for (int32_t r = 0; r < rows; ++r) {
            const uint64_t seen = spans_[r].count >= kLanes ? ~uint64_t(0) : ((uint64_t(1) << spans_[r].count) - 1) << spans_[r].first;
            uint64_t hidden[2] = {~seen, 0};
            if (hidden[0] != 0) { Duplicate(scores_[r * kLanes], kMasked, hidden, 1, 1, 8); }
        }
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void DotBatch(const LocalTensor<float>& query, const LocalTensor<float>& keys, int32_t first, int32_t count, int32_t region) {
        const int32_t width = tiling_->headSize, pitch = tiling_->keyPitch;
        const int32_t lanes = static_cast<int32_t>(Smaller(kLanes, width));
        const BinaryRepeatParams byRow(1, 1, 1, 8, pitch / 8, 0);
        for (int32_t c = 0; c < width; c += kLanes) {
            const int32_t part = static_cast<int32_t>(Smaller(kLanes, width - c));
            for (int32_t i = 0; i < count; ++i) {
                const RowSpan span = spans_[first + i];
                if (span.count == 0) { continue; }
                const LocalTensor<float> k = keys[span.first * pitch + c], q = query[(first + i) * width + c];
                if (c == 0) {
                    Mul(scratch_[i * region], k, q, part, span.count, byRow);
                } else {
                    MulAddDst(scratch_[i * region], k, q, part, span.count, byRow);
                }
            }
            PipeBarrier<PIPE_V>();
        }
        for (int32_t i = 0; i < count; ++i) {
            const RowSpan span = spans_[first + i];
            if (span.count == 0) { continue; }
            WholeReduceSum(scores_[(first + i) * kLanes + span.first], scratch_[i * region], lanes, span.count, 1, 1, 8);
        }
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void AccumulateBatch(RowState& state, const LocalTensor<float>& values, int32_t first, int32_t count, int32_t region) {
        const int32_t width = tiling_->vHeadSize, pitch = tiling_->valuePitch;
        for (int32_t i = 0; i < count; ++i) {
            Brcb(weights_[i * kLanes * 8], scores_[(first + i) * kLanes], kLanes / 8, BrcbRepeatParams(1, 8));
        }
        PipeBarrier<PIPE_V>();
        const BinaryRepeatParams byPosition(1, 1, 0, width / 8, pitch / 8, 1);
        int32_t longest = 0;
        for (int32_t i = 0; i < count; ++i) {
            const RowSpan span = spans_[first + i];
            if (span.count == 0) { continue; }
            longest = static_cast<int32_t>(Larger(longest, span.count));
            for (int32_t c = 0; c < width; c += kLanes) {
                Mul(scratch_[i * region + c], values[span.first * pitch + c], weights_[(i * kLanes + span.first) * 8],
                    Smaller(kLanes, width - c), span.count, byPosition);
            }
        }
        PipeBarrier<PIPE_V>();
        FoldRows(first, count, region, longest);
        for (int32_t i = 0; i < count; ++i) {
            if (spans_[first + i].count == 0) { continue; }
            const LocalTensor<float> row = state.Accumulator(first + i);
            Add(row, row, scratch_[i * region], width);
        }
    }

    // Sums each region's rows into its first by halving: the order depends on the row's span alone.
    __aicore__ inline void FoldRows(int32_t first, int32_t count, int32_t region, int32_t longest) {
        const int32_t width = tiling_->vHeadSize;
        int32_t left[kMaxBatch];
        for (int32_t i = 0; i < count; ++i) { left[i] = spans_[first + i].count; }
        while (longest > 1) {
            for (int32_t i = 0; i < count; ++i) {
                const int32_t half = left[i] / 2;
                if (half == 0) { continue; }
                const LocalTensor<float> rows = scratch_[i * region];
                Add(rows, rows, rows[(left[i] - half) * width], half * width);
                left[i] -= half;
            }
            PipeBarrier<PIPE_V>();
            longest -= longest / 2;
        }
    }

    // 0, 1, 2, ... as floats, written once by the scalar unit.
    __aicore__ inline void FillRamp(TPipe* pipe) {
        const LocalTensor<float> ramp = ramp_.Get<float>();
        for (int32_t i = 0; i < kLanes; ++i) { ramp.SetValue(i, static_cast<float>(i)); }
        const TEventID event = pipe->FetchEventID(HardEvent::S_V);
        SetFlag<HardEvent::S_V>(event);
        WaitFlag<HardEvent::S_V>(event);
    }

    const PagedAttentionTilingData* tiling_ = nullptr;
    TBuf<TPosition::VECCALC> scoreBuffer_, scratchBuffer_, weightBuffer_, ramp_;
    LocalTensor<float> scores_, scratch_, weights_;
    RowSpan spans_[kMaxRows];
};

}  // namespace pagegraft
