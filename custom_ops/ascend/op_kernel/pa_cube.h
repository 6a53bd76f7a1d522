// The cube half of the mixed kernel (AIC): q.k and p.v on Mmad, exchanged with the vector cores through the workspace.
//
// Per KV tile i of a unit: AIC computes scores(i) -> vector cores turn them into weights(i) -> AIC computes the product
// weights(i) * values(i) -> vector cores add it up. scores(i + 1) are computed while weights(i) are under way: scores and
// weights have two buffers each, the products one.
#pragma once
#include "pa_kv_tiles.h"
#include "pa_work.h"

namespace pagegraft {

constexpr int32_t kCubeRows = 2 * kMaxRows;   // of a unit: each of the two vector cores takes half
enum CrossFlag : uint16_t { kScoresReady = 0, kWeightsReady = 1, kProductReady = 2 };

// A group's part of the workspace.
template <typename T>
struct Exchange {
    GlobalTensor<float> scores[2], product;   // [kCubeRows, kLanes], [kCubeRows, vHeadSize]
    GlobalTensor<T> weights[2];               // [kCubeRows, kLanes]

    __aicore__ inline void Init(GM_ADDR workspace, int64_t group, int32_t vHeadSize) {
        constexpr int64_t tile = kCubeRows * kLanes;
        const int64_t bytes = CubeExchangeBytes(vHeadSize, sizeof(T));
        __gm__ uint8_t* base = (__gm__ uint8_t*)workspace + group * bytes;
        for (int32_t i = 0; i < 2; ++i) {
            scores[i].SetGlobalBuffer((__gm__ float*)(base + i * tile * 4), tile);
            weights[i].SetGlobalBuffer((__gm__ T*)(base + 2 * tile * 4 + i * tile * sizeof(T)), tile);
        }
        product.SetGlobalBuffer((__gm__ float*)(base + 2 * tile * 4 + 2 * tile * sizeof(T)), kCubeRows * vHeadSize);
    }
};

__aicore__ inline Unit CubeUnit(const PagedAttentionTilingData& tiling, const QueryTile& tile, int32_t headTask) {
    const int32_t group = tiling.numHeads / tiling.kvHeads;
    const int32_t skipped = headTask % tiling.chunksPerGroup * tiling.headsPerChunk;
    Unit unit;
    unit.kvHead = headTask / tiling.chunksPerGroup;
    unit.firstHead = unit.kvHead * group + skipped;
    unit.heads = static_cast<int32_t>(Smaller(tiling.headsPerChunk, group - skipped));
    unit.firstRow = 0;
    unit.rows = tile.tokens * unit.heads;
    return unit;
}

template <typename T>
class CubeSide {
public:
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        tiling_ = tiling;
        walk_.Init(tiling, at);
        finder_.Init(tiling, at);
        exchange_.Init(at.workspace, GetBlockIdx(), tiling->vHeadSize);
        const uint64_t slots = static_cast<uint64_t>(tiling->numBlocks) * tiling->blockSize * tiling->kvHeads;
        keys_.SetGlobalBuffer((__gm__ T*)at.keyCache, slots * tiling->headSize);
        values_.SetGlobalBuffer((__gm__ T*)at.valueCache, slots * tiling->vHeadSize);
        query_.SetGlobalBuffer((__gm__ T*)at.query, static_cast<uint64_t>(tiling->numTokens) * tiling->queryStride);
        const int32_t widest = static_cast<int32_t>(Larger(tiling->headSize, tiling->vHeadSize));
        pipe->InitBuffer(queryL1_, 1, kCubeRows * tiling->headSize * sizeof(T));
        pipe->InitBuffer(weightsL1_, 1, kCubeRows * kLanes * sizeof(T));
        pipe->InitBuffer(kvL1_, 2, kLanes * widest * sizeof(T));
        pipe->InitBuffer(left_, 1, kCubeRows * Larger(tiling->headSize, kLanes) * sizeof(T));
        pipe->InitBuffer(right_, 1, kLanes * widest * sizeof(T));
        pipe->InitBuffer(result_, 1, kCubeRows * Larger(tiling->vHeadSize, kLanes) * sizeof(float));
    }

    __aicore__ inline void Run() {
        const int64_t group = GetBlockIdx(), groups = tiling_->usedCores;
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
    __aicore__ inline void RunUnit(const QueryTile& tile, const Unit& unit) {
        KvTile tiles[2];
        int32_t at = 0;
        bool more = finder_.Find(tile.sequence, tile.low, tile.high, tiles[0]);
        if (!more) { return; }
        LoadQuery(tile, unit);
        const LocalTensor<T> query = queryL1_.template DeQue<T>();
        Scores(query, unit, tiles[0], 0);
        while (more) {
            const KvTile& now = tiles[at];
            KvTile& next = tiles[1 - at];
            const bool another = finder_.Find(tile.sequence, now.start + now.count, tile.high, next);
            if (another) { Scores(query, unit, next, 1 - at); }
            CrossCoreWaitFlag(kWeightsReady);
            Product(unit, now, at);
            at = 1 - at;
            more = another;
        }
        queryL1_.FreeTensor(query);
    }

    // NZ with kCubeRows rows: every token's heads are consecutive rows.
    __aicore__ inline void LoadQuery(const QueryTile& tile, const Unit& unit) {
        const int32_t width = tiling_->headSize;
        LocalTensor<T> in = queryL1_.template AllocTensor<T>();
        for (int32_t t = 0; t < tile.tokens; ++t) {
            const uint64_t from = static_cast<uint64_t>(tile.firstToken + t) * tiling_->queryStride + static_cast<uint64_t>(unit.firstHead) * width;
            DataCopy(in[t * unit.heads * 16], query_[from], Nd2NzParams(1, unit.heads, width, 0, width, kCubeRows, 1, 0));
        }
        FillRows(in, query_[QueryStart(tile, unit)], unit.rows, RoundUp(unit.rows, 16), width, width, kCubeRows);
        queryL1_.EnQue(in);
    }

    __aicore__ inline uint64_t QueryStart(const QueryTile& tile, const Unit& unit) const {
        return static_cast<uint64_t>(tile.firstToken) * tiling_->queryStride + static_cast<uint64_t>(unit.firstHead) * tiling_->headSize;
    }

    // Rows up to the next multiple of 16 enter the product: they hold a copy of a real row, never leftovers.
    __aicore__ inline void FillRows(const LocalTensor<T>& in, const GlobalTensor<T>& row, int32_t from, int32_t to, int32_t width,
                                    int32_t pitch, int32_t stride) {
        for (int32_t r = from; r < to; ++r) { DataCopy(in[r * 16], row, Nd2NzParams(1, 1, width, 0, pitch, stride, 1, 0)); }
    }

    __aicore__ inline LocalTensor<T> LoadTile(const GlobalTensor<T>& cache, const KvTile& kv, int32_t kvHead, int32_t width) {
        LocalTensor<T> in = kvL1_.template AllocTensor<T>();
        const int32_t pitch = tiling_->kvHeads * width, rows = RoundUp(kv.count, 16);
        int32_t row = 0;
        for (int32_t i = 0; i < kv.pieces; ++i) {
            const uint64_t from = static_cast<uint64_t>(kv.slot[i]) * pitch + static_cast<uint64_t>(kvHead) * width;
            DataCopy(in[row * 16], cache[from], Nd2NzParams(1, kv.length[i], width, 0, pitch, rows, 1, 0));
            row += kv.length[i];
        }
        FillRows(in, cache[static_cast<uint64_t>(kv.slot[0]) * pitch + static_cast<uint64_t>(kvHead) * width], row, rows, width, pitch, rows);
        kvL1_.EnQue(in);
        return kvL1_.template DeQue<T>();
    }

    // L1 NZ [rows, depth] to L0A zZ; `stride` is the number of rows that a fractal column of the L1 tensor holds.
    __aicore__ inline void LoadLeft(const LocalTensor<T>& from, int32_t rows, int32_t depth, int32_t stride) {
        LocalTensor<T> left = left_.template AllocTensor<T>();
        LoadData2DParams load;
        load.repeatTimes = static_cast<uint8_t>(depth / 16);
        load.srcStride = static_cast<uint16_t>(stride / 16);
        for (int32_t m = 0; m < rows / 16; ++m) {
            load.startIndex = static_cast<uint16_t>(m);
            LoadData(left[m * depth * 16], from, load);
        }
        left_.EnQue(left);
    }

    __aicore__ inline void Multiply(const GlobalTensor<float>& to, int32_t rows, int32_t columns, int32_t depth, int32_t pitch) {
        const int32_t m = RoundUp(rows, 16);
        LocalTensor<T> left = left_.template DeQue<T>(), right = right_.template DeQue<T>();
        LocalTensor<float> result = result_.template AllocTensor<float>();
        MmadParams product;
        product.m = static_cast<uint16_t>(m);
        product.n = static_cast<uint16_t>(columns);
        product.k = static_cast<uint16_t>(depth);
        Mmad(result, left, right, product);
        left_.FreeTensor(left);
        right_.FreeTensor(right);
        result_.EnQue(result);
        LocalTensor<float> out = result_.template DeQue<float>();
        FixpipeParamsV220 store;
        store.nSize = static_cast<uint16_t>(columns);
        store.mSize = static_cast<uint16_t>(rows);
        store.srcStride = static_cast<uint16_t>(m);
        store.dstStride = static_cast<uint32_t>(pitch);
        Fixpipe(to, out, store);
        result_.FreeTensor(out);
    }

    // K [positions, D] in NZ is already what L0B wants of K^T.
    __aicore__ inline void Scores(const LocalTensor<T>& query, const Unit& unit, const KvTile& kv, int32_t buffer) {
        const int32_t width = tiling_->headSize, positions = RoundUp(kv.count, 16);
        LocalTensor<T> keys = LoadTile(keys_, kv, unit.kvHead, width);
        LoadLeft(query, RoundUp(unit.rows, 16), width, kCubeRows);
        LocalTensor<T> right = right_.template AllocTensor<T>();
        LoadData2DParams load;
        load.repeatTimes = static_cast<uint8_t>(positions / 16 * (width / 16));
        load.srcStride = 1;
        LoadData(right, keys, load);
        right_.EnQue(right);
        kvL1_.FreeTensor(keys);
        Multiply(exchange_.scores[buffer], unit.rows, positions, width, kLanes);
        CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
    }

    // V [positions, Dv] has its depth in rows: L0B takes each fractal transposed.
    __aicore__ inline void Product(const Unit& unit, const KvTile& kv, int32_t buffer) {
        const int32_t width = tiling_->vHeadSize, positions = RoundUp(kv.count, 16), rows = RoundUp(unit.rows, 16);
        LocalTensor<T> values = LoadTile(values_, kv, unit.kvHead, width);
        LocalTensor<T> in = weightsL1_.template AllocTensor<T>();
        DataCopy(in, exchange_.weights[buffer], Nd2NzParams(1, unit.rows, positions, 0, kLanes, kCubeRows, 1, 0));
        FillRows(in, exchange_.weights[buffer], unit.rows, rows, positions, kLanes, kCubeRows);
        weightsL1_.EnQue(in);
        LocalTensor<T> weights = weightsL1_.template DeQue<T>();
        LoadLeft(weights, rows, positions, kCubeRows);
        weightsL1_.FreeTensor(weights);
        LocalTensor<T> right = right_.template AllocTensor<T>();
        LoadData2DParams load;
        load.repeatTimes = static_cast<uint8_t>(width / 16);
        load.srcStride = static_cast<uint16_t>(positions / 16);
        load.ifTranspose = true;
        for (int32_t k = 0; k < positions / 16; ++k) {
            load.startIndex = static_cast<uint16_t>(k);
            LoadData(right[k * width * 16], values, load);
        }
        right_.EnQue(right);
        kvL1_.FreeTensor(values);
        Multiply(exchange_.product, unit.rows, width, positions, width);
        CrossCoreSetFlag<2, PIPE_FIX>(kProductReady);
    }

    const PagedAttentionTilingData* tiling_ = nullptr;
    TileWalk walk_;
    KvTileFinder finder_;
    Exchange<T> exchange_;
    GlobalTensor<T> keys_, values_, query_;
    TQue<TPosition::A1, 1> queryL1_, weightsL1_;
    TQue<TPosition::B1, 1> kvL1_;
    TQue<TPosition::A2, 1> left_;
    TQue<TPosition::B2, 1> right_;
    TQue<TPosition::CO1, 1> result_;
};

}  // namespace pagegraft
