// The vector half of the mixed kernel (AIV): softmax and accumulation of half of a unit's rows.
#pragma once
#include "pa_cube.h"
#include "pa_scores.h"

namespace pagegraft {

template <typename T>
class VectorSide {
public:
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        pipe_ = pipe;
        tiling_ = tiling;
        walk_.Init(tiling, at);
        finder_.Init(tiling, at);
        state_.Init(pipe, tiling);
        math_.Init(pipe, tiling);
        exchange_.Init(at.workspace, GetBlockIdx() / 2, tiling->vHeadSize);
        output_.SetGlobalBuffer((__gm__ T*)at.output, static_cast<uint64_t>(tiling->numTokens) * tiling->numHeads * tiling->vHeadSize);
        if (tiling->hasSink != 0) { sink_.SetGlobalBuffer((__gm__ T*)at.headSink, tiling->numHeads); }
        pipe->InitBuffer(in_, 2, kMaxRows * Larger(tiling->vHeadSize, kLanes) * sizeof(float));
        pipe->InitBuffer(out_, 1, kMaxRows * Larger(tiling->vHeadSize, kLanes) * sizeof(T));
        pipe->InitBuffer(sinkBuffer_, kMaxRows * 8 * sizeof(float));
    }

    __aicore__ inline void Run() {
        const int64_t group = GetBlockIdx() / 2, groups = tiling_->usedCores;
        int64_t first = 0;
        QueryTile tile;
        walk_.Restart();
        while (walk_.Next(tile)) {
            for (int64_t u = (group - first % groups + groups) % groups; u < walk_.HeadTasks(); u += groups) {
                RunUnit(tile, CubeUnit(*tiling_, tile, static_cast<int32_t>(u)));
            }
            first += walk_.HeadTasks();
        }
    }

private:
    // Rows [0, half) belong to vector core 0 of the group, the others to core 1; a core without rows only keeps step.
    __aicore__ inline void RunUnit(const QueryTile& tile, Unit unit) {
        const int32_t half = static_cast<int32_t>(CeilDiv(unit.rows, 2));
        unit.firstRow = GetSubBlockIdx() == 0 ? 0 : half;
        unit.rows = GetSubBlockIdx() == 0 ? half : unit.rows - half;
        if (unit.rows > 0) {
            state_.Begin(unit.rows);
            if (tiling_->hasSink != 0) { LoadSink(unit); }
        }
        KvTile kv;
        int32_t buffer = 0;
        for (int64_t at = tile.low; finder_.Find(tile.sequence, at, tile.high, kv); at = kv.start + kv.count) {
            CrossCoreWaitFlag(kScoresReady);
            if (unit.rows > 0) { Weigh(tile, unit, kv, buffer); }
            CrossCoreSetFlag<2, PIPE_MTE3>(kWeightsReady);
            CrossCoreWaitFlag(kProductReady);
            if (unit.rows > 0) { AddProduct(unit); }
            buffer = 1 - buffer;
        }
        if (unit.rows > 0) { Finish(tile, unit); }
    }

    __aicore__ inline void LoadSink(const Unit& unit) {
        LocalTensor<T> in = in_.template AllocTensor<T>();
        for (int32_t r = 0; r < unit.rows; ++r) {
            DataCopyPad(in[r * (32 / sizeof(T))], sink_[unit.Head(r)], DataCopyExtParams(1, sizeof(T), 0, 0, 0), DataCopyPadExtParams<T>());
        }
        in_.EnQue(in);
        LocalTensor<float> sink = sinkBuffer_.template Get<float>();
        LocalTensor<T> raw = in_.template DeQue<T>();
        constexpr int32_t lane = 32 / sizeof(T);
        for (int32_t r = 0; r < unit.rows; ++r) { Widen(sink[r * 8], raw[r * lane], 1); }
        in_.FreeTensor(raw);
        const TEventID ready = pipe_->FetchEventID(HardEvent::V_S);
        SetFlag<HardEvent::V_S>(ready);
        WaitFlag<HardEvent::V_S>(ready);
        for (int32_t r = 0; r < unit.rows; ++r) { state_.SetSink(r, sink.GetValue(r * 8)); }
        const TEventID done = pipe_->FetchEventID(HardEvent::S_V);
        SetFlag<HardEvent::S_V>(done);
        WaitFlag<HardEvent::S_V>(done);
    }

    // scores -> weights: exp(score - maximum), as the type that the cube multiplies.
    __aicore__ inline void Weigh(const QueryTile& tile, const Unit& unit, const KvTile& kv, int32_t buffer) {
        math_.SetSpans(tile, unit, kv);
        LocalTensor<float> in = in_.template AllocTensor<float>();
        const int32_t columns = RoundUp(kv.count, 16);
        DataCopy(in, exchange_.scores[buffer][static_cast<uint64_t>(unit.firstRow) * kLanes],
                 DataCopyParams(unit.rows, columns / 8, (kLanes - columns) / 8, (kLanes - columns) / 8));
        in_.EnQue(in);
        LocalTensor<float> raw = in_.template DeQue<float>();
        const LocalTensor<float>& scores = math_.Scores();
        PipeBarrier<PIPE_V>();
        Duplicate(scores, 0.0f, unit.rows * kLanes);
        PipeBarrier<PIPE_V>();
        for (int32_t r = 0; r < unit.rows; ++r) { Muls(scores[r * kLanes], raw[r * kLanes], tiling_->scale, columns); }
        in_.FreeTensor(raw);
        PipeBarrier<PIPE_V>();
        math_.Shape(tile, unit, kv);
        state_.Absorb(scores);
        LocalTensor<T> weights = out_.template AllocTensor<T>();
        Narrow(weights, scores, unit.rows * kLanes);
        out_.EnQue(weights);
        LocalTensor<T> out = out_.template DeQue<T>();
        DataCopy(exchange_.weights[buffer][static_cast<uint64_t>(unit.firstRow) * kLanes], out, unit.rows * kLanes);
        out_.FreeTensor(out);
    }

    __aicore__ inline void AddProduct(const Unit& unit) {
        const int32_t count = unit.rows * tiling_->vHeadSize;
        LocalTensor<float> in = in_.template AllocTensor<float>();
        DataCopy(in, exchange_.product[static_cast<uint64_t>(unit.firstRow) * tiling_->vHeadSize], count);
        in_.EnQue(in);
        LocalTensor<float> product = in_.template DeQue<float>();
        const LocalTensor<float> accumulator = state_.Accumulator(0);
        Add(accumulator, accumulator, product, count);
        in_.FreeTensor(product);
    }

    __aicore__ inline void Finish(const QueryTile& tile, const Unit& unit) {
        const int32_t width = tiling_->vHeadSize;
        state_.Normalise();
        LocalTensor<T> rows = out_.template AllocTensor<T>();
        state_.Store(rows);
        out_.EnQue(rows);
        LocalTensor<T> out = out_.template DeQue<T>();
        for (int32_t r = 0; r < unit.rows; ++r) {
            const uint64_t row = static_cast<uint64_t>(tile.firstToken + unit.Token(r)) * tiling_->numHeads + unit.Head(r);
            DataCopy(output_[row * width], out[r * width], width);
        }
        out_.FreeTensor(out);
    }

    TPipe* pipe_ = nullptr;
    const PagedAttentionTilingData* tiling_ = nullptr;
    TileWalk walk_;
    KvTileFinder finder_;
    RowState state_;
    TileMath math_;
    Exchange<T> exchange_;
    GlobalTensor<T> output_, sink_;
    TQue<TPosition::VECIN, 1> in_;
    TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> sinkBuffer_;
};

}  // namespace pagegraft
