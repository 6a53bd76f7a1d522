// DataCopy and DataCopyPad between GM (MTE2 in, MTE3 out) and UB.
#pragma once
#include "pipe.h"

namespace AscendC {

struct DataCopyParams {
    DataCopyParams() = default;
    DataCopyParams(emu::Count12 count, emu::U16 length, emu::U16 source_gap, emu::U16 destination_gap)
        : blockCount(count), blockLen(length), srcStride(source_gap), dstStride(destination_gap) {}
    uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;
};

struct DataCopyExtParams {
    DataCopyExtParams() = default;
    DataCopyExtParams(emu::Count12 count, emu::Checked<uint32_t, 2097151> length, emu::Checked<uint32_t> source_gap,
                      emu::Checked<uint32_t> destination_gap, uint32_t reserved)
        : blockCount(count), blockLen(length), srcStride(source_gap), dstStride(destination_gap), rsv(reserved) {}
    uint16_t blockCount = 1;
    uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, emu::U8 left, emu::U8 right, T value) : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;
    T paddingValue = T();
};

}  // namespace AscendC

namespace emu {

constexpr uint64_t RoundUpBlock(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

// Rows of `bytes`, `gm_pitch` apart in GM and `ub_pitch` apart in UB.
struct CopyShape {
    uint32_t rows;
    uint64_t bytes, gm_pitch, ub_pitch;
};

template <typename T>
void CopyIn(const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, const CopyShape& s, const char* name, bool fill) {
    if (s.rows == 0 || s.bytes == 0) { return; }
    dst.EmuAligned(name);
    Instruction copy(kMTE2, name);
    ++copy.core().stats.copy_instructions;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(src.GetPhyAddr());
    for (uint32_t r = 0; r < s.rows; ++r) {
        const uint64_t landing = fill ? RoundUpBlock(s.bytes) : s.bytes;
        dst.EmuExtent(r * s.ub_pitch, landing, name);
        src.EmuCheck(r * s.gm_pitch, s.bytes, name);
        copy.ReadGm(from + r * s.gm_pitch, s.bytes);
        const uint32_t at = dst.EmuAddress() + static_cast<uint32_t>(r * s.ub_pitch);
        copy.Write(at, static_cast<uint32_t>(landing));
        uint8_t* to = &copy.core().ub[at];
        std::memcpy(to, from + r * s.gm_pitch, s.bytes);
        for (uint64_t b = s.bytes; b < landing; ++b) { to[b] = to[b % sizeof(T)]; }  // filler: the row's first element
        copy.core().stats.gm_to_ub_bytes += s.bytes;
    }
}

template <typename T>
void CopyOut(const AscendC::GlobalTensor<T>& dst, const AscendC::LocalTensor<T>& src, const CopyShape& s, const char* name) {
    if (s.rows == 0 || s.bytes == 0) { return; }
    src.EmuAligned(name);
    Instruction copy(kMTE3, name);
    ++copy.core().stats.copy_instructions;
    uint8_t* to = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(dst.GetPhyAddr()));
    for (uint32_t r = 0; r < s.rows; ++r) {
        src.EmuExtent(r * s.ub_pitch, s.bytes, name);
        dst.EmuCheck(r * s.gm_pitch, s.bytes, name);
        const uint32_t at = src.EmuAddress() + static_cast<uint32_t>(r * s.ub_pitch);
        copy.Read(at, static_cast<uint32_t>(s.bytes));
        copy.WriteGm(to + r * s.gm_pitch, s.bytes);
        std::memcpy(to + r * s.gm_pitch, &copy.core().ub[at], s.bytes);
        copy.core().stats.ub_to_gm_bytes += s.bytes;
    }
}

inline CopyShape Blocks(const AscendC::DataCopyParams& p, bool gm_is_source) {
    const uint64_t bytes = static_cast<uint64_t>(p.blockLen) * kBlockBytes;
    const uint64_t source = bytes + static_cast<uint64_t>(p.srcStride) * kBlockBytes;
    const uint64_t destination = bytes + static_cast<uint64_t>(p.dstStride) * kBlockBytes;
    return {p.blockCount, bytes, gm_is_source ? source : destination, gm_is_source ? destination : source};
}

template <typename T>
void CheckGmAligned(const AscendC::GlobalTensor<T>& tensor, const char* name) {
    if (reinterpret_cast<uintptr_t>(tensor.GetPhyAddr()) % sizeof(T) != 0) {
        Fail("gm-alignment", "%s: GM address is not aligned to its element", name);
    }
}

}  // namespace emu

namespace AscendC {

// count * sizeof(T) is rounded down to whole DataBlocks, as on the device.
template <typename T>
__aicore__ inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, emu::Checked<uint32_t> count) {
    emu::CheckGmAligned(src, "DataCopy");
    const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T) / emu::kBlockBytes * emu::kBlockBytes;
    emu::CopyIn(dst, src, {1, bytes, 0, 0}, "DataCopy", false);
}
template <typename T>
__aicore__ inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, emu::Checked<uint32_t> count) {
    emu::CheckGmAligned(dst, "DataCopy");
    const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T) / emu::kBlockBytes * emu::kBlockBytes;
    emu::CopyOut(dst, src, {1, bytes, 0, 0}, "DataCopy");
}
template <typename T>
__aicore__ inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p) {
    emu::CheckGmAligned(src, "DataCopy");
    emu::CopyIn(dst, src, emu::Blocks(p, true), "DataCopy", false);
}
template <typename T>
__aicore__ inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p) {
    emu::CheckGmAligned(dst, "DataCopy");
    emu::CopyOut(dst, src, emu::Blocks(p, false), "DataCopy");
}

// Lengths and GM gaps in bytes, UB gaps in DataBlocks; each row starts at a DataBlock of its own.
template <typename T>
__aicore__ inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                                   const DataCopyPadExtParams<T>& pad) {
    if (p.blockLen % sizeof(T) != 0) { emu::Fail("copy-params", "DataCopyPad: blockLen %u is not whole elements", p.blockLen); }
    if (pad.isPad || pad.leftPadding != 0 || pad.rightPadding != 0) { emu::Fail("copy-params", "DataCopyPad: only unpadded rows are modelled"); }
    emu::CheckGmAligned(src, "DataCopyPad");
    const uint64_t ub_pitch = emu::RoundUpBlock(p.blockLen) + static_cast<uint64_t>(p.dstStride) * emu::kBlockBytes;
    emu::CopyIn(dst, src, {p.blockCount, p.blockLen, static_cast<uint64_t>(p.blockLen) + p.srcStride, ub_pitch}, "DataCopyPad", true);
}
template <typename T>
__aicore__ inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p) {
    if (p.blockLen % sizeof(T) != 0) { emu::Fail("copy-params", "DataCopyPad: blockLen %u is not whole elements", p.blockLen); }
    emu::CheckGmAligned(dst, "DataCopyPad");
    const uint64_t ub_pitch = emu::RoundUpBlock(p.blockLen) + static_cast<uint64_t>(p.srcStride) * emu::kBlockBytes;
    emu::CopyOut(dst, src, {p.blockCount, p.blockLen, static_cast<uint64_t>(p.blockLen) + p.dstStride, ub_pitch}, "DataCopyPad");
}

}  // namespace AscendC
