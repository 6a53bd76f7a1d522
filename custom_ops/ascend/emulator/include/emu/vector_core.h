// How vector instructions walk their operands: contiguous counts, or repeats of 8 DataBlocks with a mask.
#pragma once
#include "data_copy.h"

namespace AscendC {

struct BinaryRepeatParams {
    BinaryRepeatParams() = default;
    BinaryRepeatParams(emu::U8 dst_blk, emu::U8 src0_blk, emu::U8 src1_blk, emu::U8 dst_rep, emu::U8 src0_rep, emu::U8 src1_rep)
        : dstBlkStride(dst_blk), src0BlkStride(src0_blk), src1BlkStride(src1_blk), dstRepStride(dst_rep), src0RepStride(src0_rep),
          src1RepStride(src1_rep) {}
    uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1, dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};

struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(emu::U16 dst_blk, emu::U16 src_blk, emu::U8 dst_rep, emu::U8 src_rep)
        : dstBlkStride(dst_blk), srcBlkStride(src_blk), dstRepStride(dst_rep), srcRepStride(src_rep) {}
    uint16_t dstBlkStride = 1, srcBlkStride = 1;
    uint8_t dstRepStride = 8, srcRepStride = 8;
};

}  // namespace AscendC

namespace emu {

using AscendC::LocalTensor;

template <typename T>
constexpr uint32_t kLanesPerBlock = kBlockBytes / sizeof(T);
template <typename T>
constexpr uint32_t kLanesPerRepeat = kRepeatBytes / sizeof(T);

// One operand of a repeated instruction.
template <typename T>
struct Strided {
    const LocalTensor<T>& tensor;
    uint32_t block_stride, repeat_stride;
    uint64_t Offset(uint32_t repeat, uint32_t block) const {
        return (static_cast<uint64_t>(repeat) * repeat_stride + static_cast<uint64_t>(block) * block_stride) * kBlockBytes;
    }
};

template <typename T>
void CheckMask(uint64_t mask, const char* name) {
    if (mask == 0 || mask > kLanesPerRepeat<T>) {
        Fail("mask-range", "%s: mask %llu is outside 1..%u", name, static_cast<unsigned long long>(mask), kLanesPerRepeat<T>);
    }
}

template <typename T>
uint32_t LanesOf(uint64_t mask, uint32_t block) {
    const uint64_t first = static_cast<uint64_t>(block) * kLanesPerBlock<T>;
    if (mask <= first) { return 0; }
    return mask - first < kLanesPerBlock<T> ? static_cast<uint32_t>(mask - first) : kLanesPerBlock<T>;
}

// Calls visit(offset, bytes) for the bytes that each repeat touches; whole contiguous repeats in one call.
template <typename T, typename F>
void ForTouched(const Strided<T>& operand, uint64_t mask, uint32_t repeats, F visit) {
    for (uint32_t r = 0; r < repeats; ++r) {
        if (operand.block_stride == 1) {
            visit(operand.Offset(r, 0), static_cast<uint32_t>(mask * sizeof(T)));
            continue;
        }
        for (uint32_t b = 0; b < 8; ++b) {
            const uint32_t lanes = LanesOf<T>(mask, b);
            if (lanes == 0) { break; }
            visit(operand.Offset(r, b), lanes * static_cast<uint32_t>(sizeof(T)));
        }
    }
}

template <typename T>
void ReadStrided(Instruction& op, const Strided<T>& operand, uint64_t mask, uint32_t repeats) {
    operand.tensor.EmuAligned(op.name());
    ForTouched(operand, mask, repeats, [&](uint64_t offset, uint32_t bytes) {
        operand.tensor.EmuExtent(offset, bytes, op.name());
        op.Read(operand.tensor.EmuAddress() + static_cast<uint32_t>(offset), bytes);
    });
}

template <typename T>
void WriteStrided(Instruction& op, const Strided<T>& operand, uint64_t mask, uint32_t repeats) {
    operand.tensor.EmuAligned(op.name());
    ForTouched(operand, mask, repeats, [&](uint64_t offset, uint32_t bytes) {
        operand.tensor.EmuExtent(offset, bytes, op.name());
        op.Write(operand.tensor.EmuAddress() + static_cast<uint32_t>(offset), bytes);
    });
}

inline void CountRepeats(Instruction& op, uint64_t repeats) {
    ++op.core().stats.vector_instructions;
    op.core().stats.vector_repeats += repeats;
}

template <typename T>
void ReadCount(Instruction& op, const LocalTensor<T>& tensor, uint32_t count) {
    tensor.EmuAligned(op.name());
    tensor.EmuExtent(0, static_cast<uint64_t>(count) * sizeof(T), op.name());
    op.Read(tensor.EmuAddress(), count * static_cast<uint32_t>(sizeof(T)));
}
template <typename T>
void WriteCount(Instruction& op, const LocalTensor<T>& tensor, uint32_t count) {
    tensor.EmuAligned(op.name());
    tensor.EmuExtent(0, static_cast<uint64_t>(count) * sizeof(T), op.name());
    op.Write(tensor.EmuAddress(), count * static_cast<uint32_t>(sizeof(T)));
}

inline uint32_t CheckCount(int64_t count, const char* name) {
    if (count < 0 || count > static_cast<int64_t>(kUbBytes)) { Fail("field-range", "%s: count %lld", name, static_cast<long long>(count)); }
    return static_cast<uint32_t>(count);
}

// dst may be a source exactly or be disjoint from it; anything between is illegal.
template <typename T, typename U>
void CheckOverlap(const LocalTensor<T>& dst, uint64_t dst_bytes, const LocalTensor<U>& src, uint64_t src_bytes, const char* name) {
    const uint64_t d = dst.EmuAddress(), s = src.EmuAddress();
    if (d == s && sizeof(T) == sizeof(U)) { return; }
    if (d < s + src_bytes && s < d + dst_bytes) {
        Fail("operand-overlap", "%s: destination [%llu, +%llu) partly overlaps a source [%llu, +%llu)", name,
             static_cast<unsigned long long>(d), static_cast<unsigned long long>(dst_bytes), static_cast<unsigned long long>(s),
             static_cast<unsigned long long>(src_bytes));
    }
}

template <typename T>
uint64_t SpanOf(const Strided<T>& operand, uint32_t repeats) {
    return operand.Offset(repeats - 1, 7) + kBlockBytes;
}

template <typename T, typename F>
void UnaryCount(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t count, F f) {
    const uint32_t n = CheckCount(count, name);
    if (n == 0) { return; }
    Instruction op(kV, name);
    CountRepeats(op, (n + kLanesPerRepeat<T> - 1) / kLanesPerRepeat<T>);
    CheckOverlap(dst, n * sizeof(T), src, n * sizeof(T), name);
    ReadCount(op, src, n);
    WriteCount(op, dst, n);
    T* d = dst.EmuData();
    const T* s = src.EmuData();
    for (uint32_t i = 0; i < n; ++i) { d[i] = f(s[i]); }
}

template <typename T, typename F>
void BinaryCount(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, int64_t count, F f) {
    const uint32_t n = CheckCount(count, name);
    if (n == 0) { return; }
    Instruction op(kV, name);
    CountRepeats(op, (n + kLanesPerRepeat<T> - 1) / kLanesPerRepeat<T>);
    CheckOverlap(dst, n * sizeof(T), a, n * sizeof(T), name);
    CheckOverlap(dst, n * sizeof(T), b, n * sizeof(T), name);
    ReadCount(op, a, n);
    ReadCount(op, b, n);
    WriteCount(op, dst, n);
    T* d = dst.EmuData();
    const T* x = a.EmuData();
    const T* y = b.EmuData();
    for (uint32_t i = 0; i < n; ++i) { d[i] = f(x[i], y[i]); }
}

// f(old destination, a, b): the accumulating instructions read their destination, the others (kReadsDst false) do not.
template <bool kReadsDst, typename T, typename F>
void BinaryRepeat(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, uint64_t mask,
                  uint8_t repeats, const AscendC::BinaryRepeatParams& p, F f) {
    CheckMask<T>(mask, name);
    if (repeats == 0) { return; }
    const Strided<T> od{dst, p.dstBlkStride, p.dstRepStride}, oa{a, p.src0BlkStride, p.src0RepStride}, ob{b, p.src1BlkStride, p.src1RepStride};
    Instruction op(kV, name);
    CountRepeats(op, repeats);
    if (p.dstRepStride == 0 && repeats > 1) { Fail("operand-overlap", "%s: repeats accumulate into one destination", name); }
    CheckOverlap(dst, SpanOf(od, repeats), a, SpanOf(oa, repeats), name);
    CheckOverlap(dst, SpanOf(od, repeats), b, SpanOf(ob, repeats), name);
    ReadStrided(op, oa, mask, repeats);
    ReadStrided(op, ob, mask, repeats);
    if (kReadsDst) { ReadStrided(op, od, mask, repeats); }
    WriteStrided(op, od, mask, repeats);
    for (uint32_t r = 0; r < repeats; ++r) {
        for (uint32_t block = 0; block < 8; ++block) {
            const uint32_t lanes = LanesOf<T>(mask, block);
            if (lanes == 0) { break; }
            T* d = dst.EmuData(od.Offset(r, block));
            const T* x = a.EmuData(oa.Offset(r, block));
            const T* y = b.EmuData(ob.Offset(r, block));
            for (uint32_t i = 0; i < lanes; ++i) { d[i] = f(d[i], x[i], y[i]); }
        }
    }
}

}  // namespace emu
