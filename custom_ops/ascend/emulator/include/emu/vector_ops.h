// The vector instructions by name. Arithmetic rounds after each operation to the operand type.
#pragma once
#include "vector_core.h"

namespace emu {

template <typename T, typename F>
T Rounded(T a, T b, F f) {
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(f(a, b));
    } else {
        return Narrow<T>(f(Widen(a), Widen(b)));
    }
}

// The device's Exp is not correctly rounded: move the result by up to 2 units in the last place, by a hash of the
// argument, so that no kernel passes here by leaning on an exact exponential.
inline float DeviceExp(float x) {
    const float y = std::exp(x);
    if (x == 0.0f || !std::isnormal(y)) { return y; }
    const uint32_t hash = (BitsOf(x) * 2654435761u) >> 30;  // 0..3
    return FromBits(BitsOf(y) + hash - (hash > 1 ? 4u : 0u));
}

template <typename T>
constexpr bool kFloating = OneOf<T, half, float>;
template <typename T>
constexpr bool kArithmetic = OneOf<T, half, float, int16_t, int32_t>;

}  // namespace emu

#define EMU_BINARY(Name, Set, expression)                                                                                          \
    template <typename T>                                                                                                          \
    __aicore__ inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count) { \
        static_assert(emu::Set<T>, #Name ": operand type not supported by the vector unit");                                      \
        emu::BinaryCount(#Name, dst, src0, src1, count, [](T x, T y) { return emu::Rounded(x, y, [](auto a, auto b) { return expression; }); }); \
    }                                                                                                                              \
    template <typename T>                                                                                                          \
    __aicore__ inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,  \
                                emu::U8 repeatTime, const BinaryRepeatParams& params) {                                            \
        static_assert(emu::Set<T>, #Name ": operand type not supported by the vector unit");                                      \
        emu::BinaryRepeat<false>(#Name, dst, src0, src1, mask, repeatTime, params,                                                 \
                                 [](T, T x, T y) { return emu::Rounded(x, y, [](auto a, auto b) { return expression; }); });        \
    }

#define EMU_SCALAR(Name, expression)                                                                                   \
    template <typename T>                                                                                              \
    __aicore__ inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, T scalar, int32_t count) {        \
        static_assert(emu::kArithmetic<T>, #Name ": operand type not supported by the vector unit");                   \
        emu::UnaryCount(#Name, dst, src, count, [scalar](T x) { return emu::Rounded(x, scalar, [](auto a, auto b) { return expression; }); }); \
    }

#define EMU_UNARY(Name, expression)                                                                        \
    template <typename T>                                                                                  \
    __aicore__ inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count) {      \
        static_assert(emu::kFloating<T>, #Name ": operand type not supported by the vector unit");         \
        emu::UnaryCount(#Name, dst, src, count, [](T value) {                                              \
            const float x = emu::Widen(value);                                                             \
            return emu::Narrow<T>(expression);                                                             \
        });                                                                                                \
    }

namespace AscendC {

EMU_BINARY(Add, kArithmetic, a + b)
EMU_BINARY(Sub, kArithmetic, a - b)
EMU_BINARY(Mul, kArithmetic, a* b)
EMU_BINARY(Div, kFloating, a / b)
EMU_BINARY(Max, kArithmetic, a > b ? a : b)
EMU_BINARY(Min, kArithmetic, a < b ? a : b)
EMU_SCALAR(Adds, a + b)
EMU_SCALAR(Muls, a* b)
EMU_SCALAR(Maxs, a > b ? a : b)
EMU_SCALAR(Mins, a < b ? a : b)
EMU_UNARY(Exp, emu::DeviceExp(x))
EMU_UNARY(Abs, std::fabs(x))
EMU_UNARY(Sqrt, std::sqrt(x))
// Approximate on the device: about 11 good bits.
EMU_UNARY(Reciprocal, emu::FromBits(emu::BitsOf(1.0f / x) & 0xFFFFF000u))

#undef EMU_BINARY
#undef EMU_SCALAR
#undef EMU_UNARY

template <typename T>
__aicore__ inline void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,
                                 emu::U8 repeatTime, const BinaryRepeatParams& params) {
    static_assert(emu::kFloating<T>, "MulAddDst: operand type not supported by the vector unit");
    emu::BinaryRepeat<true>("MulAddDst", dst, src0, src1, mask, repeatTime, params, [](T d, T x, T y) {
        return emu::Narrow<T>(emu::Widen(d) + emu::Widen(emu::Narrow<T>(emu::Widen(x) * emu::Widen(y))));
    });
}

template <typename T>
__aicore__ inline void Axpy(const LocalTensor<T>& dst, const LocalTensor<T>& src, T scalar, int32_t count) {
    static_assert(emu::kFloating<T>, "Axpy: operand type not supported by the vector unit");
    emu::BinaryCount("Axpy", dst, dst, src, count, [scalar](T d, T x) {
        return emu::Narrow<T>(emu::Widen(d) + emu::Widen(emu::Narrow<T>(emu::Widen(x) * emu::Widen(scalar))));
    });
}

template <typename T>
__aicore__ inline void Duplicate(const LocalTensor<T>& dst, T value, int32_t count) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate: 16- and 32-bit types only");
    const uint32_t n = emu::CheckCount(count, "Duplicate");
    if (n == 0) { return; }
    emu::Instruction op(emu::kV, "Duplicate");
    emu::CountRepeats(op, (n + emu::kLanesPerRepeat<T> - 1) / emu::kLanesPerRepeat<T>);
    emu::WriteCount(op, dst, n);
    for (uint32_t i = 0; i < n; ++i) { dst.EmuData()[i] = value; }
}

// Bit mask form: lane i of each repeat is written when bit i is set (bits 64.. in mask[1], 16-bit types only).
template <typename T>
__aicore__ inline void Duplicate(const LocalTensor<T>& dst, T value, uint64_t mask[], emu::U8 repeatTime, emu::U16 dstBlockStride,
                                 emu::U8 dstRepeatStride) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate: 16- and 32-bit types only");
    if (sizeof(T) == 4 && mask[1] != 0) { emu::Fail("mask-range", "Duplicate: mask[1] must be 0 for 32-bit types"); }
    if (mask[0] == 0 && mask[1] == 0) { emu::Fail("mask-range", "Duplicate: empty mask"); }
    emu::Instruction op(emu::kV, "Duplicate");
    emu::CountRepeats(op, repeatTime);
    dst.EmuAligned("Duplicate");
    for (uint32_t r = 0; r < repeatTime; ++r) {
        for (uint32_t lane = 0; lane < emu::kLanesPerRepeat<T>; ++lane) {
            if (((mask[lane / 64] >> (lane % 64)) & 1u) == 0) { continue; }
            const uint32_t block = lane / emu::kLanesPerBlock<T>;
            const uint64_t offset = (static_cast<uint64_t>(r) * dstRepeatStride + static_cast<uint64_t>(block) * dstBlockStride) * emu::kBlockBytes +
                                    lane % emu::kLanesPerBlock<T> * sizeof(T);
            dst.EmuExtent(offset, sizeof(T), "Duplicate");
            op.Write(dst.EmuAddress() + static_cast<uint32_t>(offset), sizeof(T));
            *dst.EmuData(offset) = value;
        }
    }
}

struct BrcbRepeatParams {
    BrcbRepeatParams() = default;
    BrcbRepeatParams(emu::U16 dst_blk, emu::U16 dst_rep) : dstBlkStride(dst_blk), dstRepStride(dst_rep) {}
    uint16_t dstBlkStride = 1, dstRepStride = 8;
};

// Each repeat takes 8 scalars and fills one DataBlock with each.
template <typename T>
__aicore__ inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, emu::U8 repeatTime, const BrcbRepeatParams& p) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb: 16- and 32-bit types only");
    if (p.dstBlkStride == 0) { emu::Fail("field-range", "Brcb: dstBlkStride 0"); }
    if (repeatTime == 0) { return; }
    emu::Instruction op(emu::kV, "Brcb");
    emu::CountRepeats(op, repeatTime);
    const uint32_t scalars = 8u * repeatTime;
    emu::ReadCount(op, src, scalars);
    dst.EmuAligned("Brcb");
    for (uint32_t i = 0; i < scalars; ++i) {
        const uint64_t offset = (static_cast<uint64_t>(i / 8) * p.dstRepStride + static_cast<uint64_t>(i % 8) * p.dstBlkStride) * emu::kBlockBytes;
        dst.EmuExtent(offset, emu::kBlockBytes, "Brcb");
        op.Write(dst.EmuAddress() + static_cast<uint32_t>(offset), emu::kBlockBytes);
        for (uint32_t k = 0; k < emu::kLanesPerBlock<T>; ++k) { dst.EmuData(offset)[k] = src.EmuData()[i]; }
    }
    emu::CheckOverlap(dst, (static_cast<uint64_t>(repeatTime - 1) * p.dstRepStride + 7u * p.dstBlkStride + 1) * emu::kBlockBytes, src,
                      scalars * sizeof(T), "Brcb");
    if (dst.EmuAddress() == src.EmuAddress()) { emu::Fail("operand-overlap", "Brcb: destination is the source"); }
}

}  // namespace AscendC
