// Cast and the whole-repeat reductions.
#pragma once
#include <limits>

#include "vector_ops.h"

namespace AscendC {

enum class RoundMode { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class ReduceOrder { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

}  // namespace AscendC

namespace emu {

// The conversions that a 910B vector core has (others do not exist and must not compile).
template <typename D, typename S>
constexpr bool kCastExists =
    (OneOf<S, half> && OneOf<D, float, int8_t, int16_t, int32_t>) || (OneOf<S, float> && OneOf<D, half, bfloat16_t, int32_t, float>) ||
    (OneOf<S, bfloat16_t> && OneOf<D, float>) || (OneOf<S, int8_t> && OneOf<D, half>) || (OneOf<S, int32_t> && OneOf<D, float>) ||
    (OneOf<S, int16_t> && OneOf<D, half, float>);

template <typename D, typename S>
bool ModeAllowed(AscendC::RoundMode mode) {
    using M = AscendC::RoundMode;
    constexpr bool widens = (OneOf<S, half> && OneOf<D, float>) || OneOf<S, bfloat16_t, int8_t>;
    if (widens) { return mode == M::CAST_NONE; }
    if (OneOf<D, bfloat16_t> || (OneOf<S, float> && OneOf<D, int32_t>)) { return mode != M::CAST_NONE && mode != M::CAST_ODD; }
    return true;
}

inline float RoundFloat(float x, AscendC::RoundMode mode) {
    switch (mode) {
        case AscendC::RoundMode::CAST_FLOOR: return std::floor(x);
        case AscendC::RoundMode::CAST_CEIL: return std::ceil(x);
        case AscendC::RoundMode::CAST_TRUNC: return std::trunc(x);
        case AscendC::RoundMode::CAST_ROUND: return std::round(x);
        default: return std::nearbyint(x);
    }
}

template <typename D>
D ToInteger(float x, AscendC::RoundMode mode) {
    const float low = static_cast<float>(std::numeric_limits<D>::min());
    const float high = static_cast<float>(std::numeric_limits<D>::max());
    const float r = RoundFloat(x, mode);
    if (r != r) { return 0; }
    if (r <= low) { return std::numeric_limits<D>::min(); }
    if (r >= high) { return std::numeric_limits<D>::max(); }
    return static_cast<D>(r);
}

template <typename T, typename F>
void WholeReduce(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeats, int32_t dst_stride,
                 const U16& src_blk, const U16& src_rep, F combine) {
    CheckMask<T>(static_cast<uint64_t>(mask < 0 ? 0 : mask), name);
    if (repeats < 0 || repeats > 255) { Fail("field-range", "%s: repeat %d is outside 0..255", name, repeats); }
    if (repeats == 0) { return; }
    if (dst.EmuAddress() % sizeof(T) != 0) { Fail("ub-alignment", "%s: destination is not aligned to its element", name); }
    const Strided<T> os{src, src_blk, src_rep};
    Instruction op(kV, name);
    CountRepeats(op, static_cast<uint64_t>(repeats));
    ReadStrided(op, os, static_cast<uint64_t>(mask), static_cast<uint32_t>(repeats));
    for (int32_t r = 0; r < repeats; ++r) {
        T lanes[kLanesPerRepeat<T>];
        uint32_t n = 0;
        for (uint32_t b = 0; b < 8; ++b) {
            const T* s = src.EmuData(os.Offset(static_cast<uint32_t>(r), b));
            for (uint32_t i = 0; i < LanesOf<T>(static_cast<uint64_t>(mask), b); ++i) { lanes[n++] = s[i]; }
        }
        // A binary tree over the lanes, as the hardware adds them.
        while (n > 1) {
            const uint32_t half_n = n / 2;
            for (uint32_t i = 0; i < half_n; ++i) { lanes[i] = Rounded(lanes[2 * i], lanes[2 * i + 1], combine); }
            if (n % 2 != 0) { lanes[half_n] = lanes[n - 1]; }
            n = half_n + n % 2;
        }
        const uint64_t offset = static_cast<uint64_t>(r) * static_cast<uint64_t>(dst_stride) * sizeof(T);
        dst.EmuExtent(offset, sizeof(T), name);
        op.Write(dst.EmuAddress() + static_cast<uint32_t>(offset), sizeof(T));
        *dst.EmuData(offset) = lanes[0];
    }
}

}  // namespace emu

namespace AscendC {

template <typename D, typename S>
__aicore__ inline void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, uint32_t count) {
    static_assert(emu::kCastExists<D, S>, "Cast: this conversion does not exist on the vector unit");
    if (!emu::ModeAllowed<D, S>(mode)) { emu::Fail("cast-mode", "Cast: round mode %d is not defined for this conversion", static_cast<int>(mode)); }
    const uint32_t n = emu::CheckCount(count, "Cast");
    if (n == 0) { return; }
    emu::Instruction op(emu::kV, "Cast");
    constexpr uint32_t lanes = emu::kRepeatBytes / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));
    emu::CountRepeats(op, (n + lanes - 1) / lanes);
    emu::CheckOverlap(dst, n * sizeof(D), src, n * sizeof(S), "Cast");
    emu::ReadCount(op, src, n);
    emu::WriteCount(op, dst, n);
    D* d = dst.EmuData();
    const S* s = src.EmuData();
    for (uint32_t i = 0; i < n; ++i) {
        const float x = emu::Widen(s[i]);
        if constexpr (std::is_integral_v<D>) {
            d[i] = emu::ToInteger<D>(x, mode);
        } else if constexpr (std::is_same_v<D, S>) {
            d[i] = emu::RoundFloat(x, mode);
        } else {
            d[i] = emu::Narrow<D>(x);
        }
    }
}

template <typename T>
__aicore__ inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                                      int32_t dstRepStride, emu::U16 srcBlkStride, emu::U16 srcRepStride) {
    static_assert(emu::kFloating<T>, "WholeReduceSum: operand type not supported by the vector unit");
    emu::WholeReduce("WholeReduceSum", dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, [](auto a, auto b) { return a + b; });
}

template <typename T>
__aicore__ inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                                      int32_t dstRepStride, emu::U16 srcBlkStride, emu::U16 srcRepStride,
                                      ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
    static_assert(emu::kFloating<T>, "WholeReduceMax: operand type not supported by the vector unit");
    if (order != ReduceOrder::ORDER_ONLY_VALUE) { emu::Fail("copy-params", "WholeReduceMax: only ORDER_ONLY_VALUE is modelled"); }
    emu::WholeReduce("WholeReduceMax", dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                     [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace AscendC
