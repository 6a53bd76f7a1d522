// Small kernels, each in a right and a broken form; the broken form must trip one check of the emulator.
#include <cstdio>
#include <string>
#include <vector>

#include "kernel_operator.h"

using namespace AscendC;

namespace {

constexpr int32_t kCount = 64;

// Global memory of a run: an input of 4 * kCount floats (i at i), an output of the same size, a scratch buffer.
struct Memory {
    float* input;
    float* output;
    float* scratch;
};

using In = TQue<TPosition::VECIN, 1>;
using Out = TQue<TPosition::VECOUT, 1>;
using Work = TBuf<TPosition::VECCALC>;

GlobalTensor<float> Global(float* data, uint64_t count = 4 * kCount) {
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(data, count);
    return tensor;
}

LocalTensor<float> Filled(TPipe& pipe, Work& buffer, uint32_t floats = 8 * kCount) {
    pipe.InitBuffer(buffer, floats * 4);
    LocalTensor<float> tensor = buffer.Get<float>();
    Duplicate(tensor, 1.0f, static_cast<int32_t>(floats));
    PipeBarrier<PIPE_V>();
    return tensor;
}

template <HardEvent event>
void Sync() {
    SetFlag<event>(0);
    WaitFlag<event>(0);
}

// --- capacity, alignment, extent -----------------------------------------------------------------------------------
void Capacity(bool broken, Memory) {
    TPipe pipe;
    Work a, b;
    pipe.InitBuffer(a, 96 * 1024);
    pipe.InitBuffer(b, broken ? 96 * 1024 + 32 : 96 * 1024);
}
void BufferCount(bool broken, Memory) {
    TPipe pipe;
    for (int i = 0; i < (broken ? 65 : 64); ++i) {
        Work buffer;
        pipe.InitBuffer(buffer, 32);
    }
}
void Alignment(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Adds(x[128], x[broken ? 4 : 8], 1.0f, 8);
}
void Extent(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer, 64);
    Adds(x, x, 1.0f, broken ? 65 : 64);
}
void RepeatExtent(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer, 128);
    Add(x, x, x, 64, broken ? 3 : 2, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
}

// --- fields and masks ----------------------------------------------------------------------------------------------
void RepeatRange(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer, 256 * 8);
    const int32_t rows = broken ? 256 : 255;
    Mul(x, x, x, 8, rows, BinaryRepeatParams(1, 1, 1, 1, 1, 1));
}
void StrideRange(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer, 64);
    const int32_t stride = broken ? 256 : 255;
    Mul(x, x, x, 8, 1, BinaryRepeatParams(1, 1, 1, stride, 1, 1));
}
void MaskRange(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Mul(x, x, x, broken ? 65 : 64, 1, BinaryRepeatParams());
}
void BitMask(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    uint64_t mask[2] = {3, broken ? 1u : 0u};
    Duplicate(x, 2.0f, mask, 1, 1, 8);
}
void BlockCount(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Global(m.input), DataCopyParams(broken ? 4096 : 8, 1, 0, 0));
}
void StrideField(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Global(m.input), DataCopyParams(1, 1, broken ? 65536 : 65535, 0));
}

// --- copies --------------------------------------------------------------------------------------------------------
void RoundingDown(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    const LocalTensor<float> x = buffer.Get<float>();
    DataCopy(x, Global(m.input), broken ? 17 : 24);   // 17 floats: the 17th does not arrive
    Sync<HardEvent::MTE2_V>();
    Adds(x, x, 1.0f, 17);
}
void CopyBounds(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 1024);
    GlobalTensor<float> all;
    all.SetGlobalBuffer(m.input);
    DataCopy(buffer.Get<float>(), all[broken ? 4 * kCount - 32 : 4 * kCount - 64], 64);
}
void DeclaredLength(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 1024);
    DataCopy(buffer.Get<float>(), Global(m.input, broken ? 63 : 64), 64);
}
void WriteInput(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Sync<HardEvent::V_MTE3>();
    DataCopy(Global(broken ? m.input : m.output), x, 64);
}
void GmAlignment(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 1024);
    float* odd = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(m.input) + (broken ? 2 : 4));
    DataCopy(buffer.Get<float>(), Global(odd, 64), 64);
}
void PadParameters(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 1024);
    DataCopyPad(buffer.Get<float>(), Global(m.input), DataCopyExtParams(2, broken ? 6 : 12, 4, 0, 0), DataCopyPadExtParams<float>());
}
void PadRowsApart(bool broken, Memory m) {   // each row starts at its own DataBlock: 3 floats and 5 of filler
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, broken ? 32 : 64);
    DataCopyPad(buffer.Get<float>(), Global(m.input), DataCopyExtParams(2, 12, 0, 0, 0), DataCopyPadExtParams<float>());
}

// --- queues --------------------------------------------------------------------------------------------------------
void ThroughQueue(Memory m, int omit) {   // omit: 0 nothing, 1 EnQue, 2 DeQue, 3 FreeTensor of the input
    TPipe pipe;
    In in;
    Out out;
    pipe.InitBuffer(in, 1, 256);
    pipe.InitBuffer(out, 1, 256);
    LocalTensor<float> x = in.AllocTensor<float>();
    DataCopy(x, Global(m.input), 64);
    if (omit != 1) { in.EnQue(x); }
    if (omit != 2) { x = in.DeQue<float>(); }
    LocalTensor<float> y = out.AllocTensor<float>();
    Adds(y, x, 1.0f, 64);
    if (omit != 3) { in.FreeTensor(x); }
    out.EnQue(y);
    y = out.DeQue<float>();
    DataCopy(Global(m.output), y, 64);
    out.FreeTensor(y);
}
void NoEnQue(bool broken, Memory m) { ThroughQueue(m, broken ? 1 : 0); }
void NoDeQue(bool broken, Memory m) { ThroughQueue(m, broken ? 2 : 0); }
void NoFree(bool broken, Memory m) { ThroughQueue(m, broken ? 3 : 0); }
void TooManyAllocs(bool broken, Memory) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 256);
    for (int i = 0; i < (broken ? 3 : 2); ++i) { in.EnQue(in.AllocTensor<float>()); }
    for (int i = 0; i < 2; ++i) { in.FreeTensor(in.DeQue<float>()); }
}
void EventIds(bool broken, Memory) {
    TPipe pipe;
    In a, b;
    pipe.InitBuffer(a, 4, 256);
    pipe.InitBuffer(b, broken ? 5 : 4, 256);
}
void TwoPipes(bool broken, Memory) {
    TPipe pipe;
    if (broken) { TPipe second; }
}

// --- order between pipes -------------------------------------------------------------------------------------------
void LoadThenCompute(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    const LocalTensor<float> x = buffer.Get<float>();
    DataCopy(x, Global(m.input), 64);
    if (!broken) { Sync<HardEvent::MTE2_V>(); }
    Adds(x, x, 1.0f, 64);
}
void ComputeThenStore(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    if (!broken) { Sync<HardEvent::V_MTE3>(); }
    DataCopy(Global(m.output), x, 64);
}
void OverwriteWhileRead(bool broken, Memory m) {   // write after read, across pipes
    TPipe pipe;
    Work buffer, other;
    const LocalTensor<float> x = Filled(pipe, buffer), y = Filled(pipe, other);
    Adds(y, x, 1.0f, 64);
    if (!broken) { Sync<HardEvent::V_MTE2>(); }
    DataCopy(x, Global(m.input), 64);
}
void StoreThenOverwrite(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Sync<HardEvent::V_MTE3>();
    DataCopy(Global(m.output), x, 64);
    if (!broken) { Sync<HardEvent::MTE3_V>(); }
    Duplicate(x, 2.0f, 64);
}
void VectorThenVector(bool broken, Memory) {
    TPipe pipe;
    Work buffer, other;
    const LocalTensor<float> x = Filled(pipe, buffer), y = Filled(pipe, other);
    Adds(y, x, 1.0f, 64);
    if (!broken) { PipeBarrier<PIPE_V>(); }
    Adds(x, y, 1.0f, 64);
}
void CopyOverCopy(bool broken, Memory m) {   // write after write on one pipe
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Global(m.input), 64);
    if (!broken) { PipeBarrier<PIPE_MTE2>(); }
    DataCopy(buffer.Get<float>(), Global(m.input)[64], 64);
}
void ReadByScalar(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    if (!broken) { Sync<HardEvent::V_S>(); }
    x.GetValue(0);
}
void WrittenByScalar(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    const LocalTensor<float> x = buffer.Get<float>();
    for (uint32_t i = 0; i < 8; ++i) { x.SetValue(i, 1.0f); }
    if (!broken) { Sync<HardEvent::S_V>(); }
    Adds(x, x, 1.0f, 8);
}
void StoreThenLoad(bool broken, Memory m) {   // through global memory
    TPipe pipe;
    Work buffer, other;
    const LocalTensor<float> x = Filled(pipe, buffer);
    pipe.InitBuffer(other, 256);
    Sync<HardEvent::V_MTE3>();
    DataCopy(Global(m.output), x, 64);
    if (!broken) { Sync<HardEvent::MTE3_MTE2>(); }
    DataCopy(other.Get<float>(), Global(m.output), 64);
}

// --- flags ---------------------------------------------------------------------------------------------------------
void WaitWithoutSet(bool broken, Memory) {
    if (!broken) { SetFlag<HardEvent::V_S>(1); }
    WaitFlag<HardEvent::V_S>(1);
}
void SetTwice(bool broken, Memory) {
    SetFlag<HardEvent::V_S>(1);
    SetFlag<HardEvent::V_S>(broken ? 1 : 2);
    WaitFlag<HardEvent::V_S>(1);
    WaitFlag<HardEvent::V_S>(2);
}
void SetWithoutWait(bool broken, Memory) {
    SetFlag<HardEvent::V_S>(1);
    if (!broken) { WaitFlag<HardEvent::V_S>(1); }
}
void FlagId(bool broken, Memory) {
    SetFlag<HardEvent::V_S>(broken ? 8 : 7);
    WaitFlag<HardEvent::V_S>(broken ? 8 : 7);
}

// --- values and operands -------------------------------------------------------------------------------------------
void FreshBuffer(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    const LocalTensor<float> x = buffer.Get<float>();
    if (!broken) {
        Duplicate(x, 0.0f, 64);
        PipeBarrier<PIPE_V>();
    }
    Adds(x, x, 1.0f, 64);
}
void PaddingLanes(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 256);
    const LocalTensor<float> x = buffer.Get<float>();
    Duplicate(x, 0.0f, 60);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(x, x, broken ? 64 : 60, 1, 1, 1, 8);
}
void UnwrittenWorkspace(bool broken, Memory m) {
    TPipe pipe;
    Work buffer, other;
    const LocalTensor<float> x = Filled(pipe, buffer);
    pipe.InitBuffer(other, 256);
    Sync<HardEvent::V_MTE3>();
    DataCopy(Global(m.scratch), x, broken ? 56 : 64);
    Sync<HardEvent::MTE3_MTE2>();
    DataCopy(other.Get<float>(), Global(m.scratch), 64);
}
void PartialOverlap(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Adds(x[broken ? 8 : 64], x, 1.0f, 64);
}
void AccumulatingRepeats(bool broken, Memory) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Add(x, x, x[128], 64, 2, BinaryRepeatParams(1, 1, 1, broken ? 0 : 8, broken ? 0 : 8, 8));
}
void CastMode(bool broken, Memory) {
    TPipe pipe;
    Work buffer, other;
    const LocalTensor<float> x = Filled(pipe, buffer);
    pipe.InitBuffer(other, 256);
    Cast(other.Get<bfloat16_t>(), x, broken ? RoundMode::CAST_NONE : RoundMode::CAST_RINT, 64);
}
void ScalarCache(bool broken, Memory m) {
    TPipe pipe;
    Work buffer;
    const LocalTensor<float> x = Filled(pipe, buffer);
    Sync<HardEvent::V_MTE3>();
    DataCopy(Global(m.output), x, 64);
    Sync<HardEvent::MTE3_S>();
    Global(broken ? m.output : m.input).GetValue(0);
}

// --- several cores -------------------------------------------------------------------------------------------------
void Exchange(bool barrier, bool sync, Memory m) {   // each core reads what its neighbour wrote
    TPipe pipe;
    Work buffer, other;
    const LocalTensor<float> x = Filled(pipe, buffer);
    pipe.InitBuffer(other, 256);
    const uint64_t mine = static_cast<uint64_t>(GetBlockIdx()) * 64, theirs = (mine + 64) % 128;
    Sync<HardEvent::V_MTE3>();
    DataCopy(Global(m.output)[mine], x, 64);
    if (barrier) { PipeBarrier<PIPE_ALL>(); }
    if (sync) { SyncAll(); }
    DataCopy(other.Get<float>(), Global(m.output)[theirs], 64);
}
void NoSyncAll(bool broken, Memory m) { Exchange(true, !broken, m); }
void NoBarrierBeforeSyncAll(bool broken, Memory m) { Exchange(!broken, true, m); }
void OneCoreLeaves(bool broken, Memory) {
    if (!broken || GetBlockIdx() == 0) { SyncAll(); }
}
void MixedBlockNum(bool broken, Memory m) {   // 2 vector cores in one group: GetBlockNum() is 1
    TPipe pipe;
    Work buffer;
    pipe.InitBuffer(buffer, 4 * 4 * kCount);
    const int64_t cores = broken ? GetBlockNum() : GetBlockNum() * GetTaskRation();
    const int64_t share = 4 * kCount / cores;
    DataCopy(buffer.Get<float>(), Global(m.input)[static_cast<uint64_t>(GetBlockIdx() * share)], share);
}

struct Case {
    const char* name;
    void (*kernel)(bool broken, Memory memory);
    const char* check;
    uint32_t cores = 1, per_group = 1;
};

const Case kCases[] = {
    {"capacity", Capacity, "ub-capacity"},
    {"buffer-count", BufferCount, "ub-capacity"},
    {"alignment", Alignment, "ub-alignment"},
    {"extent", Extent, "ub-extent"},
    {"repeat-extent", RepeatExtent, "ub-extent"},
    {"repeat-range", RepeatRange, "field-range"},
    {"stride-range", StrideRange, "field-range"},
    {"mask-range", MaskRange, "mask-range"},
    {"bit-mask", BitMask, "mask-range"},
    {"block-count", BlockCount, "field-range"},
    {"stride-field", StrideField, "field-range"},
    {"copy-rounds-down", RoundingDown, "uninitialised"},
    {"copy-bounds", CopyBounds, "gm-bounds"},
    {"declared-length", DeclaredLength, "gm-bounds"},
    {"write-input", WriteInput, "gm-bounds"},
    {"gm-alignment", GmAlignment, "gm-alignment"},
    {"pad-parameters", PadParameters, "copy-params"},
    {"pad-rows", PadRowsApart, "ub-extent"},
    {"no-enque", NoEnQue, "queue-discipline"},
    {"no-deque", NoDeQue, "happens-before"},
    {"no-free", NoFree, "queue-discipline"},
    {"too-many-allocs", TooManyAllocs, "queue-discipline"},
    {"event-ids", EventIds, "queue-discipline"},
    {"two-pipes", TwoPipes, "queue-discipline"},
    {"mte2-v", LoadThenCompute, "happens-before"},
    {"v-mte3", ComputeThenStore, "happens-before"},
    {"v-mte2", OverwriteWhileRead, "happens-before"},
    {"mte3-v", StoreThenOverwrite, "happens-before"},
    {"v-v", VectorThenVector, "happens-before"},
    {"mte2-mte2", CopyOverCopy, "happens-before"},
    {"v-s", ReadByScalar, "happens-before"},
    {"s-v", WrittenByScalar, "happens-before"},
    {"mte3-mte2-gm", StoreThenLoad, "happens-before"},
    {"wait-without-set", WaitWithoutSet, "flag-pairing"},
    {"set-twice", SetTwice, "flag-pairing"},
    {"set-without-wait", SetWithoutWait, "flag-pairing"},
    {"flag-id", FlagId, "flag-range"},
    {"fresh-buffer", FreshBuffer, "uninitialised"},
    {"padding-lanes", PaddingLanes, "uninitialised"},
    {"unwritten-workspace", UnwrittenWorkspace, "uninitialised"},
    {"partial-overlap", PartialOverlap, "operand-overlap"},
    {"accumulating-repeats", AccumulatingRepeats, "operand-overlap"},
    {"cast-mode", CastMode, "cast-mode"},
    {"scalar-cache", ScalarCache, "data-cache"},
    {"no-syncall", NoSyncAll, "happens-before", 2},
    {"no-barrier-before-syncall", NoBarrierBeforeSyncAll, "happens-before", 2},
    {"one-core-leaves", OneCoreLeaves, "sync-all", 2},
    {"mixed-block-num", MixedBlockNum, "gm-bounds", 2, 2},
};

}  // namespace

extern "C" int pg_case_count() { return static_cast<int>(sizeof(kCases) / sizeof(kCases[0])); }
extern "C" const char* pg_case_name(int index) { return kCases[index].name; }
extern "C" const char* pg_case_check(int index) { return kCases[index].check; }

// Writes the violated check ("" when none) to `check` and its text to `text` (512 bytes each).
extern "C" void pg_case_run(int index, int broken, char* check, char* text) {
    const Case& c = kCases[index];
    std::vector<float> input(4 * kCount), output(4 * kCount), scratch(4 * kCount);
    for (int32_t i = 0; i < 4 * kCount; ++i) { input[static_cast<size_t>(i)] = static_cast<float>(i); }
    emu::Launcher launcher(c.cores, c.per_group);
    launcher.AddRegion("input", input.data(), input.size() * 4);
    launcher.AddRegion("output", output.data(), output.size() * 4).writable = true;
    emu::GmRegion& workspace = launcher.AddRegion("workspace", scratch.data(), scratch.size() * 4);
    workspace.writable = workspace.scratch = true;
    const bool ran = launcher.Run([&] { c.kernel(broken != 0, Memory{input.data(), output.data(), scratch.data()}); });
    std::snprintf(check, 512, "%s", ran ? "" : launcher.violation().check.c_str());
    std::snprintf(text, 512, "%s", ran ? "" : launcher.violation().text.c_str());
}

// half arithmetic rounds after each operation: 2048 + 1 + 1 is 2048 in half, 2050 when added in float.
extern "C" float pg_half_sum() {
    float result = 0.0f;
    emu::Launcher launcher(1);
    launcher.Run([&] {
        TPipe pipe;
        Work buffer;
        pipe.InitBuffer(buffer, 64);
        const LocalTensor<half> x = buffer.Get<half>();
        Duplicate(x, half(2048.0f), 16);
        for (int i = 0; i < 2; ++i) {
            PipeBarrier<PIPE_V>();
            Adds(x, x, half(1.0f), 16);
        }
        Sync<HardEvent::V_S>();
        result = static_cast<float>(x.GetValue(0));
    });
    return result;
}

extern "C" uint16_t pg_half_bits(float value) { return emu::HalfBits(value); }
extern "C" float pg_half_value(uint16_t bits) { return emu::HalfValue(bits); }
extern "C" uint16_t pg_bfloat_bits(float value) { return emu::BfloatBits(value); }
extern "C" float pg_device_exp(float value) { return emu::DeviceExp(value); }
