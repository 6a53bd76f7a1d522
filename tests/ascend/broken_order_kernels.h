// Wrong kernels, one way each: order between pipes and cores, flags, values and operands.
#pragma once
#include "broken_memory_kernels.h"

namespace {

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

}  // namespace
