// Helpers and constants of the kernel.
#pragma once
#include "kernel_operator.h"
#include "paged_attention_tiling_data.h"

namespace pagegraft {

using namespace AscendC;

// A masked score, and the maximum of a row that has seen no key. They differ so that exp(kMasked - kNoKey) is 0: a row
// without a visible key keeps a zero sum.
constexpr float kMasked = -3.0e38f;
constexpr float kNoKey = -1.0e30f;
constexpr float kTinySum = 1.0e-30f;
constexpr float kHuge = 3.0e38f;

__aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__aicore__ inline int64_t Larger(int64_t a, int64_t b) { return a > b ? a : b; }
__aicore__ inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
__aicore__ inline int32_t RoundUp(int32_t a, int32_t b) { return (a + b - 1) / b * b; }

template <typename A, typename B>
struct Same {
    static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
    static constexpr bool value = true;
};

// Conversions between a tensor's type and float. Float itself has no cast: adding 0 copies it.
template <typename T>
__aicore__ inline void Widen(const LocalTensor<float>& out, const LocalTensor<T>& in, int32_t count) {
    if constexpr (Same<T, float>::value) {
        Adds(out, in, 0.0f, count);
    } else {
        Cast(out, in, RoundMode::CAST_NONE, count);
    }
}
template <typename T>
__aicore__ inline void Narrow(const LocalTensor<T>& out, const LocalTensor<float>& in, int32_t count) {
    if constexpr (Same<T, float>::value) {
        Adds(out, in, 0.0f, count);
    } else {
        Cast(out, in, RoundMode::CAST_RINT, count);
    }
}

// The kernel's tensors, in the order of the operator definition.
struct TensorAddresses {
    GM_ADDR query;
    GM_ADDR key;
    GM_ADDR value;
    GM_ADDR keyCache;
    GM_ADDR valueCache;
    GM_ADDR cumulative;
    GM_ADDR past;
    GM_ADDR blockTable;
    GM_ADDR slotMapping;
    GM_ADDR headSink;
    GM_ADDR keyScale;
    GM_ADDR valueScale;
    GM_ADDR output;
    GM_ADDR workspace;
};

// The sequences of the step as the device finds them. A sequence with impossible lengths has no visible position and
// writes nothing: it cannot touch another's blocks.
struct Sequence {
    int32_t begin, end;   // packed rows
    int64_t past, total;  // positions cached before, and after
    bool valid;
};

class Sequences {
public:
    __aicore__ inline void Init(const PagedAttentionTilingData* tiling, const TensorAddresses& at) {
        tiling_ = tiling;
        cumulative_.SetGlobalBuffer((__gm__ int32_t*)at.cumulative, tiling->numSeqs + 1);
        past_.SetGlobalBuffer((__gm__ int32_t*)at.past, tiling->numSeqs);
    }

    __aicore__ inline Sequence Get(int32_t index) const {
        Sequence s;
        s.begin = static_cast<int32_t>(Smaller(Larger(cumulative_.GetValue(index), 0), tiling_->numTokens));
        s.end = static_cast<int32_t>(Smaller(Larger(cumulative_.GetValue(index + 1), s.begin), tiling_->numTokens));
        s.past = past_.GetValue(index);
        s.total = s.past + (s.end - s.begin);
        s.valid = s.past >= 0 && s.total <= static_cast<int64_t>(tiling_->tableWidth) * tiling_->blockSize;
        return s;
    }

private:
    const PagedAttentionTilingData* tiling_ = nullptr;
    GlobalTensor<int32_t> cumulative_, past_;
};

}  // namespace pagegraft
