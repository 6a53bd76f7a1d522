// Paged attention of a step: every core takes its share of (query tile, KV head, head chunk, KV split) units.
#pragma once
#include "pa_scores.h"

namespace pagegraft {

template <typename T, typename C>
class Attention {
public:
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        pipe_ = pipe;
        tiling_ = tiling;
        walk_.Init(tiling, at);
        reader_.Init(pipe, tiling, at);
        state_.Init(pipe, tiling);
        math_.Init(pipe, tiling);
        pipe->InitBuffer(in_, 1, tiling->queryInBytes);
        pipe->InitBuffer(out_, 1, tiling->outBytes);
        pipe->InitBuffer(queryBuffer_, tiling->queryBytes);
        pipe->InitBuffer(sinkBuffer_, kMaxRows * sizeof(float));
        query_.SetGlobalBuffer((__gm__ T*)at.query, static_cast<uint64_t>(tiling->numTokens) * tiling->queryStride);
        output_.SetGlobalBuffer((__gm__ T*)at.output, static_cast<uint64_t>(tiling->numTokens) * tiling->numHeads * tiling->vHeadSize);
        if (tiling->hasSink != 0) { sink_.SetGlobalBuffer((__gm__ T*)at.headSink, tiling->numHeads); }
        keyScale_.SetGlobalBuffer((__gm__ float*)at.keyScale);
        valueScale_.SetGlobalBuffer((__gm__ float*)at.valueScale);
        partials_.SetGlobalBuffer((__gm__ float*)at.workspace);
        capacity_ = tiling->tokensPerTile * tiling->headsPerChunk * tiling->vHeadSize;
        partialFloats_ = PartialFloats(tiling->vHeadSize, tiling->tokensPerTile * tiling->headsPerChunk);
    }

    // Returns whether any tile was split, that is, whether Combine has work. Every core gets the same answer.
    __aicore__ inline bool Attend() {
        const int64_t core = GetBlockIdx(), cores = tiling_->usedCores;
        int64_t first = 0;   // number of the tile's first unit
        QueryTile tile;
        walk_.Restart();
        while (walk_.Next(tile)) {
            const int64_t units = static_cast<int64_t>(walk_.HeadTasks()) * tile.splits;
            for (int64_t u = (core - first % cores + cores) % cores; u < units; u += cores) {
                RunUnit(tile, static_cast<int32_t>(u / tile.splits), static_cast<int32_t>(u % tile.splits));
            }
            first += units;
        }
        return walk_.AnySplit();
    }

    // Second pass, after all cores are done with the first: merges the splits of a tile in their order.
    __aicore__ inline void Combine() {
        const int64_t core = GetBlockIdx(), cores = tiling_->usedCores;
        int64_t first = 0;
        QueryTile tile;
        walk_.Restart();
        while (walk_.Next(tile)) {
            if (tile.splits <= 1) { continue; }
            for (int64_t task = (core - first % cores + cores) % cores; task < walk_.HeadTasks(); task += cores) {
                CombineTask(tile, static_cast<int32_t>(task));
            }
            first += walk_.HeadTasks();
        }
    }

private:
    __aicore__ inline Unit UnitOf(const QueryTile& tile, int32_t headTask) const {
        const int32_t group = tiling_->numHeads / tiling_->kvHeads;
        const int32_t skipped = headTask % tiling_->chunksPerGroup * tiling_->headsPerChunk;
        Unit unit;
        unit.kvHead = headTask / tiling_->chunksPerGroup;
        unit.firstHead = unit.kvHead * group + skipped;
        unit.heads = static_cast<int32_t>(Smaller(tiling_->headsPerChunk, group - skipped));
        unit.firstRow = 0;
        unit.rows = tile.tokens * unit.heads;
        return unit;
    }

    __aicore__ inline void RunUnit(const QueryTile& tile, int32_t headTask, int32_t split) {
        const Unit unit = UnitOf(tile, headTask);
        const int64_t begin = tile.low + split * walk_.SplitTokens();
        const int64_t end = Smaller(tile.high, begin + walk_.SplitTokens());
        KvTile tiles[2];
        int32_t at = 0;
        bool more = reader_.Find(tile.sequence, begin, end, tiles[0]);
        if (more) { reader_.FetchKeys(tiles[0], unit.kvHead); }
        LoadQuery(tile, unit);
        state_.Begin(unit.rows);
        if (tiling_->hasSink != 0 && split == 0) { LoadSink(unit); }
        while (more) {
            const KvTile& now = tiles[at];
            KvTile& next = tiles[1 - at];
            reader_.FetchValues(now, unit.kvHead);
            const bool another = reader_.Find(tile.sequence, now.start + now.count, end, next);
            math_.SetSpans(tile, unit, now);
            math_.Dot(queryBuffer_.template Get<float>(), reader_.Take(now.count * tiling_->keyPitch, math_.Scratch()), unit.rows);
            if (another) { reader_.FetchKeys(next, unit.kvHead); }
            math_.Shape(tile, unit, now);
            state_.Absorb(math_.Scores());
            math_.Accumulate(state_, reader_.Take(now.count * tiling_->valuePitch, math_.Scratch()), unit.rows);
            at = 1 - at;
            more = another;
        }
        if (tile.splits > 1) {
            SavePartial(tile.firstPartial + static_cast<int64_t>(headTask) * tile.splits + split, unit);
        } else {
            Finish(tile, unit);
        }
    }

    // query * scale * k_scale in float, [rows, headSize].
    __aicore__ inline void LoadQuery(const QueryTile& tile, const Unit& unit) {
        const int32_t width = tiling_->headSize, run = unit.heads * width;
        LocalTensor<T> in = in_.template AllocTensor<T>();
        const uint64_t from = static_cast<uint64_t>(tile.firstToken) * tiling_->queryStride + static_cast<uint64_t>(unit.firstHead) * width;
        DataCopy(in, query_[from], DataCopyParams(tile.tokens, run * sizeof(T) / 32, (tiling_->queryStride - run) * sizeof(T) / 32, 0));
        in_.EnQue(in);
        LocalTensor<float> query = queryBuffer_.template Get<float>();
        LocalTensor<T> raw = in_.template DeQue<T>();
        Widen(query, raw, unit.rows * width);
        in_.FreeTensor(raw);
        float scale = tiling_->scale;
        if (tiling_->keyQuant == kQuantPerTensor) { scale *= keyScale_.GetValue(0); }
        PipeBarrier<PIPE_V>();
        Muls(query, query, scale, unit.rows * width);
        if (tiling_->keyQuant != kQuantPerChannel) { return; }
        LocalTensor<float> columns = LoadColumns(keyScale_, unit.kvHead, width);
        PipeBarrier<PIPE_V>();
        for (int32_t c = 0; c < width; c += kLanes) {
            Mul(query[c], query[c], columns[c], Smaller(kLanes, width - c), unit.rows, BinaryRepeatParams(1, 1, 1, width / 8, width / 8, 0));
        }
        in_.FreeTensor(columns);
    }

    // A KV head's row of a per-channel scale [G, 1, width]; the caller frees it.
    __aicore__ inline LocalTensor<float> LoadColumns(const GlobalTensor<float>& scale, int32_t kvHead, int32_t width) {
        LocalTensor<float> in = in_.template AllocTensor<float>();
        DataCopy(in, scale[static_cast<uint64_t>(kvHead) * width], width);
        in_.EnQue(in);
        return in_.template DeQue<float>();
    }

    __aicore__ inline void LoadSink(const Unit& unit) {
        LocalTensor<T> in = in_.template AllocTensor<T>();
        DataCopyPad(in, sink_[unit.firstHead], DataCopyExtParams(1, unit.heads * sizeof(T), 0, 0, 0), DataCopyPadExtParams<T>());
        in_.EnQue(in);
        LocalTensor<float> sink = sinkBuffer_.template Get<float>();
        LocalTensor<T> raw = in_.template DeQue<T>();
        Widen(sink, raw, unit.heads);
        in_.FreeTensor(raw);
        const TEventID ready = pipe_->FetchEventID(HardEvent::V_S);
        SetFlag<HardEvent::V_S>(ready);
        WaitFlag<HardEvent::V_S>(ready);
        for (int32_t r = 0; r < unit.rows; ++r) { state_.SetSink(r, sink.GetValue(r % unit.heads)); }
        const TEventID done = pipe_->FetchEventID(HardEvent::S_V);
        SetFlag<HardEvent::S_V>(done);
        WaitFlag<HardEvent::S_V>(done);
    }

    __aicore__ inline void Finish(const QueryTile& tile, const Unit& unit) {
        state_.Normalise();
        if (tiling_->valueQuant == kQuantPerTensor) {
            state_.ScaleAll(valueScale_.GetValue(0));
        } else if (tiling_->valueQuant == kQuantPerChannel) {
            LocalTensor<float> columns = LoadColumns(valueScale_, unit.kvHead, tiling_->vHeadSize);
            state_.ScaleColumns(columns);
            in_.FreeTensor(columns);
        }
        LocalTensor<T> rows = out_.template AllocTensor<T>();
        state_.Store(rows);
        out_.EnQue(rows);
        LocalTensor<T> out = out_.template DeQue<T>();
        const int32_t run = unit.heads * tiling_->vHeadSize, stride = tiling_->numHeads * tiling_->vHeadSize;
        const uint64_t to = static_cast<uint64_t>(tile.firstToken) * stride + static_cast<uint64_t>(unit.firstHead) * tiling_->vHeadSize;
        DataCopy(output_[to], out, DataCopyParams(tile.tokens, run * sizeof(T) / 32, 0, (stride - run) * sizeof(T) / 32));
        out_.FreeTensor(out);
    }

    __aicore__ inline void SavePartial(int64_t slot, const Unit& unit) {
        LocalTensor<float> saved = out_.template AllocTensor<float>();
        state_.Save(saved, capacity_);
        out_.EnQue(saved);
        LocalTensor<float> out = out_.template DeQue<float>();
        const GlobalTensor<float> to = partials_[static_cast<uint64_t>(slot * partialFloats_)];
        DataCopy(to, out, unit.rows * tiling_->vHeadSize);
        DataCopy(to[capacity_], out[capacity_], 2 * kMaxRows);
        out_.FreeTensor(out);
    }

    __aicore__ inline void CombineTask(const QueryTile& tile, int32_t headTask) {
        const Unit unit = UnitOf(tile, headTask);
        const int64_t slot = tile.firstPartial + static_cast<int64_t>(headTask) * tile.splits;
        state_.Begin(unit.rows);
        FetchPartial(slot, unit);
        for (int32_t split = 0; split < tile.splits; ++split) {
            if (split + 1 < tile.splits) { FetchPartial(slot + split + 1, unit); }
            LocalTensor<float> partial = reader_.TakePartial();
            state_.Merge(partial, capacity_);
            reader_.FreePartial(partial);
        }
        Finish(tile, unit);
    }

    __aicore__ inline void FetchPartial(int64_t slot, const Unit& unit) {
        reader_.FetchPartial(partials_[static_cast<uint64_t>(slot * partialFloats_)], unit.rows * tiling_->vHeadSize, capacity_);
    }

    TPipe* pipe_ = nullptr;
    const PagedAttentionTilingData* tiling_ = nullptr;
    TileWalk walk_;
    KvTileReader<C> reader_;
    RowState state_;
    TileMath math_;
    GlobalTensor<T> query_, output_, sink_;
    GlobalTensor<float> keyScale_, valueScale_, partials_;
    TQue<TPosition::VECIN, 1> in_;
    TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> queryBuffer_, sinkBuffer_;
    int32_t capacity_ = 0;
    int64_t partialFloats_ = 0;
};

}  // namespace pagegraft
