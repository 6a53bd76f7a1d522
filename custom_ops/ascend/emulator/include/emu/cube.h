// The cube side of a mixed kernel: ND to NZ copies, fractal loads, Mmad, Fixpipe, and flags between cores.
//
// Layouts (half and bfloat16: C0 = 16 elements of a 32-byte row, fractals of 16 x 16): L1 holds NZ, fractal columns
// outside, rows inside; L0A zZ, L0B nZ, L0C NZ with float fractals of 16 x 16.
#pragma once
#include "vector_reduce.h"

#define ASCEND_IS_AIC (::emu::CurrentCore().cube)
#define ASCEND_IS_AIV (!::emu::CurrentCore().cube)

namespace AscendC {

struct Nd2NzParams {
    Nd2NzParams() = default;
    Nd2NzParams(emu::U16 nd, emu::U16 n, emu::U16 d, emu::U16 nd_stride, emu::U16 source_row, emu::Checked<uint16_t, 16384> c0_stride,
                emu::U16 n_stride, emu::U16 matrix_stride)
        : ndNum(nd), nValue(n), dValue(d), srcNdMatrixStride(nd_stride), srcDValue(source_row), dstNzC0Stride(c0_stride),
          dstNzNStride(n_stride), dstNzMatrixStride(matrix_stride) {}
    uint16_t ndNum = 1, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0, dstNzC0Stride = 0, dstNzNStride = 1, dstNzMatrixStride = 0;
};

struct LoadData2DParams {
    uint16_t startIndex = 0;
    uint8_t repeatTimes = 0;
    uint16_t srcStride = 0;
    uint8_t sid = 0;
    uint16_t dstGap = 0;
    bool ifTranspose = false;
    uint8_t addrMode = 0;
};

struct MmadParams {
    uint16_t m = 0, n = 0, k = 0;
    bool cmatrixInitVal = true;
};

enum class QuantMode_t { NoQuant, F322F16, F322BF16 };

struct FixpipeParamsV220 {
    uint16_t nSize = 0, mSize = 0, srcStride = 0;
    uint32_t dstStride = 0;
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    bool reluEn = false;
    uint16_t ndNum = 1, srcNdStride = 0, dstNdStride = 0;
};

template <typename T>
__aicore__ inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p) {
    static_assert(sizeof(T) == 2, "Nd2Nz is modelled for 16-bit types");
    if (p.ndNum != 1) { emu::Fail("copy-params", "Nd2Nz: only one matrix a call is modelled"); }
    if (p.dValue % 16 != 0 || p.nValue == 0) { emu::Fail("copy-params", "Nd2Nz: dValue %u is no multiple of 16, or no rows", p.dValue); }
    dst.EmuAligned("DataCopy(Nd2Nz)");
    emu::Instruction copy(emu::kMTE2, "DataCopy(Nd2Nz)");
    ++copy.core().stats.copy_instructions;
    for (uint32_t n = 0; n < p.nValue; ++n) {
        const T* row = src.GetPhyAddr(static_cast<uint64_t>(n) * p.srcDValue);
        src.EmuCheck(static_cast<uint64_t>(n) * p.srcDValue * sizeof(T), p.dValue * sizeof(T), copy.name());
        copy.ReadGm(row, p.dValue * sizeof(T));
        copy.core().stats.gm_to_ub_bytes += p.dValue * sizeof(T);
        for (uint32_t c = 0; c < p.dValue / 16u; ++c) {
            const uint64_t at = (static_cast<uint64_t>(c) * p.dstNzC0Stride + static_cast<uint64_t>(n) * p.dstNzNStride) * emu::kBlockBytes;
            dst.EmuExtent(at, emu::kBlockBytes, copy.name());
            copy.Write(dst.EmuAddress() + static_cast<uint32_t>(at), emu::kBlockBytes);
            std::memcpy(dst.EmuData(at), row + c * 16, emu::kBlockBytes);
        }
    }
}

// L1 to L0A or L0B, in fractals of 512 bytes.
template <typename T>
__aicore__ inline void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p) {
    static_assert(sizeof(T) == 2, "LoadData is modelled for 16-bit types");
    constexpr uint32_t kFractal = 512;
    if (p.repeatTimes == 0) { emu::Fail("field-range", "LoadData: repeatTimes 0"); }
    if (dst.EmuAddress() % kFractal != 0) { emu::Fail("ub-alignment", "LoadData: L0 destination is not 512-byte aligned"); }
    emu::Instruction load(emu::kMTE1, "LoadData");
    for (uint32_t i = 0; i < p.repeatTimes; ++i) {
        const uint64_t from = (p.startIndex + static_cast<uint64_t>(i) * p.srcStride) * kFractal, to = static_cast<uint64_t>(i) * (p.dstGap + 1u) * kFractal;
        src.EmuExtent(from, kFractal, load.name());
        dst.EmuExtent(to, kFractal, load.name());
        load.Read(src.EmuAddress() + static_cast<uint32_t>(from), kFractal);
        load.Write(dst.EmuAddress() + static_cast<uint32_t>(to), kFractal);
        const T* s = src.EmuData(from);
        T* d = dst.EmuData(to);
        for (uint32_t r = 0; r < 16; ++r) {
            for (uint32_t c = 0; c < 16; ++c) { d[r * 16 + c] = p.ifTranspose ? s[c * 16 + r] : s[r * 16 + c]; }
        }
    }
}

// c[m, n] (+)= a[m, k] * b[k, n], products and sums in float.
template <typename T>
__aicore__ inline void Mmad(const LocalTensor<float>& c, const LocalTensor<T>& a, const LocalTensor<T>& b, const MmadParams& p) {
    static_assert(sizeof(T) == 2, "Mmad is modelled for 16-bit types");
    if (p.k % 16 != 0 || p.k == 0 || p.m == 0 || p.n == 0 || p.m > 4095 || p.n > 4095) { emu::Fail("field-range", "Mmad: m %u n %u k %u", p.m, p.n, p.k); }
    if (p.m == 1) { emu::Fail("field-range", "Mmad: m 1 switches to the vector-matrix form, which is not modelled"); }
    const uint32_t mb = (p.m + 15u) / 16, nb = (p.n + 15u) / 16, kb = p.k / 16u;
    emu::Instruction op(emu::kM, "Mmad");
    a.EmuExtent(0, static_cast<uint64_t>(mb) * kb * 512, op.name());
    b.EmuExtent(0, static_cast<uint64_t>(nb) * kb * 512, op.name());
    c.EmuExtent(0, static_cast<uint64_t>(mb) * nb * 1024, op.name());
    op.Read(a.EmuAddress(), mb * kb * 512);
    op.Read(b.EmuAddress(), nb * kb * 512);
    if (!p.cmatrixInitVal) { op.Read(c.EmuAddress(), mb * nb * 1024); }
    op.Write(c.EmuAddress(), mb * nb * 1024);
    op.core().stats.cube_products += static_cast<uint64_t>(mb) * nb * kb * 4096;
    const T* x = a.EmuData();
    const T* y = b.EmuData();
    float* z = c.EmuData();
    for (uint32_t m = 0; m < mb * 16; ++m) {
        for (uint32_t n = 0; n < nb * 16; ++n) {
            float& out = z[((n / 16) * mb + m / 16) * 256 + (m % 16) * 16 + n % 16];
            float sum = p.cmatrixInitVal ? 0.0f : out;
            for (uint32_t k = 0; k < p.k; ++k) {
                const float left = emu::Widen(x[((m / 16) * kb + k / 16) * 256 + (m % 16) * 16 + k % 16]);
                sum += left * emu::Widen(y[((k / 16) * nb + n / 16) * 256 + (n % 16) * 16 + k % 16]);
            }
            out = sum;
        }
    }
}

// L0C (NZ) to rows in GM.
template <typename T>
__aicore__ inline void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<float>& src, const FixpipeParamsV220& p) {
    static_assert(std::is_same_v<T, float>, "Fixpipe is modelled without conversion");
    if (p.quantPre != QuantMode_t::NoQuant || p.ndNum != 1) { emu::Fail("copy-params", "Fixpipe: only NoQuant and one matrix are modelled"); }
    emu::Instruction copy(emu::kFIX, "Fixpipe");
    ++copy.core().stats.copy_instructions;
    for (uint32_t m = 0; m < p.mSize; ++m) {
        const uint64_t row = static_cast<uint64_t>(m) * p.dstStride;
        dst.EmuCheck(row * sizeof(T), p.nSize * sizeof(T), copy.name());
        copy.WriteGm(dst.GetPhyAddr(row), p.nSize * sizeof(T));
        copy.core().stats.ub_to_gm_bytes += p.nSize * sizeof(T);
        for (uint32_t n = 0; n < p.nSize; ++n) {
            const uint64_t at = (static_cast<uint64_t>(n / 16) * p.srcStride * 16 + m * 16u + n % 16) * sizeof(float);
            src.EmuExtent(at, sizeof(float), copy.name());
            copy.Read(src.EmuAddress() + static_cast<uint32_t>(at), sizeof(float));
            const_cast<T*>(dst.GetPhyAddr(row))[n] = *src.EmuData(at);
        }
    }
}

// Between the cube core and the vector cores of a group (mode 2). A vector core's flag is for the cube core, which
// waits for both; the cube core's is for both vector cores.
template <uint8_t modeId, pipe_t pipe>
__aicore__ inline void CrossCoreSetFlag(uint16_t flagId) {
    static_assert(modeId == 2, "only mode 2 is modelled");
    if (flagId > 10) { emu::Fail("flag-range", "cross-core flag id %u is outside 0..10", flagId); }
    emu::Core& core = emu::CurrentCore();
    emu::CrossSignal signal;
    signal.source = core.index;
    signal.own = emu::KnowledgeAfter(core, emu::PipeIndex(pipe));
    signal.foreign = core.foreign;
    for (auto& other : emu::ActiveMachine()->cores) {
        if (other->group != core.group || other->cube == core.cube) { continue; }
        std::vector<emu::CrossSignal>& waiting = other->signals[flagId][core.cube ? 0 : core.sub];
        if (waiting.size() >= 15) { emu::Fail("flag-range", "cross-core flag %u counts beyond 15", flagId); }
        waiting.push_back(signal);
    }
    ++emu::ActiveMachine()->cross_events;
}

template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
__aicore__ inline void CrossCoreWaitFlag(uint16_t flagId) {
    emu::Core& core = emu::CurrentCore();
    const uint32_t senders = core.cube ? emu::ActiveMachine()->per_group : 1;
    for (uint32_t s = 0; s < senders; ++s) {
        std::vector<emu::CrossSignal>& waiting = core.signals[flagId][s];
        while (waiting.empty()) { emu::Launcher::Active()->Yield(); }
        const emu::CrossSignal signal = waiting.front();
        waiting.erase(waiting.begin());
        core.foreign[signal.source].Join(signal.own);
        for (size_t i = 0; i < signal.foreign.size(); ++i) {
            if (i != core.index) { core.foreign[i].Join(signal.foreign[i]); }
        }
    }
    ++emu::ActiveMachine()->cross_events;
}

}  // namespace AscendC
