// The online-softmax state of up to kMaxRows rows: running maximum, running sum and unnormalised output, all in float.
#pragma once
#include "pa_common.h"

namespace pagegraft {

class RowState {
public:
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling) {
        width_ = tiling->vHeadSize;
        pipe->InitBuffer(accumulatorBuffer_, tiling->accBytes);
        pipe->InitBuffer(statistics_, kStatistics * kMaxRows * sizeof(float));
        pipe->InitBuffer(broadcast_, 2 * kMaxRows * kBroadcast * sizeof(float));
        accumulator_ = accumulatorBuffer_.Get<float>();
        LocalTensor<float> all = statistics_.Get<float>();
        Duplicate(all, 0.0f, kStatistics * kMaxRows);
        maximum_ = all;
        sum_ = all[kMaxRows];
        tile_ = all[2 * kMaxRows];
        rescale_ = all[3 * kMaxRows];
        other_ = all[4 * kMaxRows];
        factors_ = broadcast_.Get<float>();
        otherFactors_ = factors_[kMaxRows * kBroadcast];
    }

    __aicore__ inline void Begin(int32_t rows) {
        rows_ = rows;
        PipeBarrier<PIPE_V>();
        Duplicate(maximum_, kNoKey, kMaxRows);
        Duplicate(sum_, 0.0f, kMaxRows);
        Duplicate(accumulator_, 0.0f, rows * width_);
    }

    __aicore__ inline LocalTensor<float> Accumulator(int32_t row) const { return accumulator_[row * width_]; }

    // A sink is a key whose logit is `sink` and whose value is 0. Scalar writes: the caller synchronises S with V.
    __aicore__ inline void SetSink(int32_t row, float sink) {
        maximum_.SetValue(row, sink);
        sum_.SetValue(row, 1.0f);
    }

    // Turns scores [rows, kLanes] into exp(score - new maximum), and rescales what was accumulated so far.
    __aicore__ inline void Absorb(const LocalTensor<float>& scores) {
        WholeReduceMax(tile_, scores, kLanes, rows_, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
        PipeBarrier<PIPE_V>();
        Max(tile_, maximum_, tile_, kMaxRows);
        PipeBarrier<PIPE_V>();
        Sub(rescale_, maximum_, tile_, kMaxRows);
        Brcb(factors_, tile_, RoundUp(rows_, 8) / 8, BrcbRepeatParams(1, 8));
        PipeBarrier<PIPE_V>();
        Exp(rescale_, rescale_, kMaxRows);
        Adds(maximum_, tile_, 0.0f, kMaxRows);
        Sub(scores, scores, factors_, kLanes, rows_, BinaryRepeatParams(1, 1, 0, 8, 8, 1));
        PipeBarrier<PIPE_V>();
        Exp(scores, scores, rows_ * kLanes);
        Mul(sum_, sum_, rescale_, kMaxRows);
        Brcb(factors_, rescale_, RoundUp(rows_, 8) / 8, BrcbRepeatParams(1, 8));
        PipeBarrier<PIPE_V>();
        WholeReduceSum(tile_, scores, kLanes, rows_, 1, 1, 8);
        Scale(accumulator_, factors_);
        PipeBarrier<PIPE_V>();
        Add(sum_, sum_, tile_, kMaxRows);
    }

    // Adds a partial result [accumulators | kMaxRows maxima | kMaxRows sums] of the same rows; clobbers it.
    __aicore__ inline void Merge(const LocalTensor<float>& partial, int32_t capacity) {
        LocalTensor<float> maximum = partial[capacity], sum = partial[capacity + kMaxRows];
        PipeBarrier<PIPE_V>();
        Max(tile_, maximum_, maximum, kMaxRows);
        PipeBarrier<PIPE_V>();
        Sub(rescale_, maximum_, tile_, kMaxRows);
        Sub(other_, maximum, tile_, kMaxRows);
        PipeBarrier<PIPE_V>();
        Exp(rescale_, rescale_, kMaxRows);
        Exp(other_, other_, kMaxRows);
        Adds(maximum_, tile_, 0.0f, kMaxRows);
        PipeBarrier<PIPE_V>();
        Mul(sum_, sum_, rescale_, kMaxRows);
        Mul(sum, sum, other_, kMaxRows);
        Brcb(factors_, rescale_, RoundUp(rows_, 8) / 8, BrcbRepeatParams(1, 8));
        Brcb(otherFactors_, other_, RoundUp(rows_, 8) / 8, BrcbRepeatParams(1, 8));
        PipeBarrier<PIPE_V>();
        Add(sum_, sum_, sum, kMaxRows);
        Scale(accumulator_, factors_);
        Scale(partial, otherFactors_);
        PipeBarrier<PIPE_V>();
        Add(accumulator_, accumulator_, partial, rows_ * width_);
    }

    // accumulator / sum; a row that has seen nothing becomes zeros.
    __aicore__ inline void Normalise() {
        PipeBarrier<PIPE_V>();
        Maxs(sum_, sum_, kTinySum, kMaxRows);
        PipeBarrier<PIPE_V>();
        Brcb(factors_, sum_, RoundUp(rows_, 8) / 8, BrcbRepeatParams(1, 8));
        PipeBarrier<PIPE_V>();
        for (int32_t c = 0; c < width_; c += kLanes) {
            Div(accumulator_[c], accumulator_[c], factors_, Smaller(kLanes, width_ - c), rows_, RowFactor());
        }
    }

    // Multiplies row elements by a vector of the head size that is the same for all rows.
    __aicore__ inline void ScaleColumns(const LocalTensor<float>& columns) {
        PipeBarrier<PIPE_V>();
        for (int32_t c = 0; c < width_; c += kLanes) {
            Mul(accumulator_[c], accumulator_[c], columns[c], Smaller(kLanes, width_ - c), rows_,
                BinaryRepeatParams(1, 1, 1, width_ / 8, width_ / 8, 0));
        }
    }

    __aicore__ inline void ScaleAll(float factor) {
        PipeBarrier<PIPE_V>();
        Muls(accumulator_, accumulator_, factor, rows_ * width_);
    }

    // Copies the state to `out` as Merge reads it.
    __aicore__ inline void Save(const LocalTensor<float>& out, int32_t capacity) {
        PipeBarrier<PIPE_V>();
        Adds(out, accumulator_, 0.0f, rows_ * width_);
        Adds(out[capacity], maximum_, 0.0f, 2 * kMaxRows);
    }

    template <typename T>
    __aicore__ inline void Store(const LocalTensor<T>& out) {
        PipeBarrier<PIPE_V>();
        Narrow(out, accumulator_, rows_ * width_);
    }

private:
    static constexpr int32_t kStatistics = 5;
    static constexpr int32_t kBroadcast = 8;   // floats of a DataBlock

    // One factor per row: the second source stays on a row's DataBlock for the whole repeat.
    __aicore__ inline BinaryRepeatParams RowFactor() const { return BinaryRepeatParams(1, 1, 0, width_ / 8, width_ / 8, 1); }

    __aicore__ inline void Scale(const LocalTensor<float>& rows, const LocalTensor<float>& factors) {
        for (int32_t c = 0; c < width_; c += kLanes) {
            Mul(rows[c], rows[c], factors, Smaller(kLanes, width_ - c), rows_, RowFactor());
        }
    }

    int32_t width_ = 0, rows_ = 0;
    TBuf<TPosition::VECCALC> accumulatorBuffer_, statistics_, broadcast_;
    LocalTensor<float> accumulator_, maximum_, sum_, tile_, rescale_, other_, factors_, otherFactors_;
};

}  // namespace pagegraft
