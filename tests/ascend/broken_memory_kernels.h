// Wrong kernels, one way each: capacity, alignment, extents, fields, copies, queues. With what all of them share.
#pragma once
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

}  // namespace
