// Writes the new keys and values to their cache slots, quantising them when the cache is int8.
#pragma once
#include "pa_common.h"

namespace pagegraft {

template <typename T, typename C>
class CacheWriter {
public:
    // `cores`: vector cores that share the tokens.
    __aicore__ inline void Init(TPipe* pipe, const PagedAttentionTilingData* tiling, const TensorAddresses& at, int32_t cores) {
        tiling_ = tiling;
        cores_ = cores;
        sequences_.Init(tiling, at);
        blockTable_.SetGlobalBuffer((__gm__ int32_t*)at.blockTable, static_cast<uint64_t>(tiling->numSeqs) * tiling->tableWidth);
        if (tiling->hasSlotMapping != 0) { slots_.SetGlobalBuffer((__gm__ int32_t*)at.slotMapping, tiling->numTokens); }
        if constexpr (Same<C, int8_t>::value) {
            pipe->InitBuffer(source_, 2, kWriteChunk * sizeof(T));
            pipe->InitBuffer(codes_, 2, kWriteChunk * sizeof(int8_t));
            pipe->InitBuffer(scaleIn_, 1, kWriteChunk * sizeof(float));
            pipe->InitBuffer(wide_, kWriteChunk * sizeof(float));
            pipe->InitBuffer(whole_, kWriteChunk * sizeof(int32_t));
            pipe->InitBuffer(narrow_, kWriteChunk * sizeof(half));
        } else {
            pipe->InitBuffer(through_, 2, kWriteChunk * sizeof(T));
        }
    }

    // `rows` holds a token's key (or value) of kvHeads * width elements at stride, offset; `cache` is [N*B, kvHeads * width].
    __aicore__ inline void Write(GM_ADDR rows, GM_ADDR cache, GM_ADDR scale, int32_t width, int32_t stride, int32_t offset, int32_t quant) {
        const int32_t elements = tiling_->kvHeads * width;
        rows_.SetGlobalBuffer((__gm__ T*)rows, static_cast<uint64_t>(tiling_->numTokens) * stride);
        cache_.SetGlobalBuffer((__gm__ C*)cache, static_cast<uint64_t>(tiling_->numBlocks) * tiling_->blockSize * elements);
        if constexpr (Same<C, int8_t>::value) { scale_.SetGlobalBuffer((__gm__ float*)scale, quant == kQuantPerChannel ? elements : 1); }
        for (int32_t first = 0; first < elements; first += kWriteChunk) {
            const int32_t count = static_cast<int32_t>(Smaller(kWriteChunk, elements - first));
            LocalTensor<float> divisor;
            if constexpr (Same<C, int8_t>::value) { divisor = LoadScale(first, count, quant); }
            WriteChunk(divisor, first, count, elements, stride, offset);
            if constexpr (Same<C, int8_t>::value) { scaleIn_.FreeTensor(divisor); }
        }
    }

private:
    __aicore__ inline void WriteChunk(const LocalTensor<float>& divisor, int32_t first, int32_t count, int32_t elements, int32_t stride,
                                      int32_t offset) {
        const int32_t core = static_cast<int32_t>(GetBlockIdx());
        for (int32_t s = 0; s < tiling_->numSeqs; ++s) {
            const Sequence sequence = sequences_.Get(s);
            const int32_t skew = (core - sequence.begin % cores_ + cores_) % cores_;
            for (int32_t t = sequence.begin + skew; t < sequence.end; t += cores_) {
                const int64_t slot = SlotOf(s, sequence, t);
                if (slot < 0 || slot >= static_cast<int64_t>(tiling_->numBlocks) * tiling_->blockSize) { continue; }
                const uint64_t from = static_cast<uint64_t>(t) * stride + offset + first;
                const uint64_t to = static_cast<uint64_t>(slot) * elements + first;
                if constexpr (Same<C, int8_t>::value) {
                    WriteQuantised(divisor, from, to, count);
                } else {
                    CopyThrough(from, to, count);
                }
            }
        }
    }

    __aicore__ inline int64_t SlotOf(int32_t index, const Sequence& sequence, int32_t token) const {
        if (tiling_->hasSlotMapping != 0) { return slots_.GetValue(token); }
        if (!sequence.valid) { return -1; }
        const int64_t position = sequence.past + (token - sequence.begin);
        const int64_t entry = static_cast<int64_t>(index) * tiling_->tableWidth + position / tiling_->blockSize;
        const int64_t block = blockTable_.GetValue(entry);
        return block < 0 ? -1 : block * tiling_->blockSize + position % tiling_->blockSize;
    }

    __aicore__ inline void CopyThrough(uint64_t from, uint64_t to, int32_t count) {
        LocalTensor<T> in = through_.template AllocTensor<T>();
        DataCopy(in, rows_[from], count);
        through_.EnQue(in);
        LocalTensor<T> out = through_.template DeQue<T>();
        DataCopy(cache_[to], out, count);
        through_.FreeTensor(out);
    }

    // One divisor per element, whatever the granularity of the scale.
    __aicore__ inline LocalTensor<float> LoadScale(int32_t first, int32_t count, int32_t quant) {
        LocalTensor<float> in = scaleIn_.template AllocTensor<float>();
        if (quant == kQuantPerChannel) { DataCopy(in, scale_[first], count); }
        scaleIn_.EnQue(in);
        LocalTensor<float> divisor = scaleIn_.template DeQue<float>();
        if (quant == kQuantPerTensor) {
            const float scale = scale_.GetValue(0);
            Duplicate(divisor, scale == 0.0f ? kHuge : scale, count);
        } else {
            ReplaceZeros(divisor, count);
        }
        return divisor;
    }

    // A zero scale stores zero codes: it becomes a divisor that makes everything round to 0.
    __aicore__ inline void ReplaceZeros(const LocalTensor<float>& divisor, int32_t count) {
        LocalTensor<float> x = wide_.Get<float>();
        LocalTensor<int32_t> whole = whole_.Get<int32_t>();
        Duplicate(x, 1.0f, count);
        PipeBarrier<PIPE_V>();
        Div(x, x, divisor, count);
        PipeBarrier<PIPE_V>();
        Mins(x, x, kHuge, count);
        PipeBarrier<PIPE_V>();
        Mul(x, x, divisor, count);   // 0 for a zero, about 1 otherwise
        PipeBarrier<PIPE_V>();
        Cast(whole, x, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Cast(x, whole, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        Adds(x, x, -1.0f, count);
        PipeBarrier<PIPE_V>();
        Muls(x, x, -kHuge, count);
        PipeBarrier<PIPE_V>();
        Add(divisor, divisor, x, count);
        PipeBarrier<PIPE_V>();
    }

    // code = round-half-even(clamp(x / scale)); through int32 because float has no direct conversion to int8.
    __aicore__ inline void WriteQuantised(const LocalTensor<float>& divisor, uint64_t from, uint64_t to, int32_t count) {
        LocalTensor<T> in = source_.template AllocTensor<T>();
        DataCopy(in, rows_[from], count);
        source_.EnQue(in);
        LocalTensor<float> x = wide_.Get<float>();
        LocalTensor<int32_t> whole = whole_.Get<int32_t>();
        LocalTensor<half> narrow = narrow_.Get<half>();
        LocalTensor<T> raw = source_.template DeQue<T>();
        Widen(x, raw, count);
        source_.FreeTensor(raw);
        PipeBarrier<PIPE_V>();
        Div(x, x, divisor, count);
        PipeBarrier<PIPE_V>();
        Maxs(x, x, -128.0f, count);
        PipeBarrier<PIPE_V>();
        Mins(x, x, 127.0f, count);
        PipeBarrier<PIPE_V>();
        Cast(whole, x, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Cast(x, whole, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        Cast(narrow, x, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        LocalTensor<int8_t> codes = codes_.template AllocTensor<int8_t>();
        Cast(codes, narrow, RoundMode::CAST_RINT, count);
        codes_.EnQue(codes);
        LocalTensor<int8_t> out = codes_.template DeQue<int8_t>();
        DataCopyPad(cache_[to], out, DataCopyExtParams(1, count, 0, 0, 0));
        codes_.FreeTensor(out);
    }

    const PagedAttentionTilingData* tiling_ = nullptr;
    int32_t cores_ = 1;
    Sequences sequences_;
    GlobalTensor<int32_t> blockTable_, slots_;
    GlobalTensor<T> rows_;
    GlobalTensor<C> cache_;
    GlobalTensor<float> scale_;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through_;
    TQue<TPosition::VECIN, 1> source_, scaleIn_;
    TQue<TPosition::VECOUT, 1> codes_;
    TBuf<TPosition::VECCALC> wide_, whole_, narrow_;
};

}  // namespace pagegraft
