// Wrong kernels, one way each: cube cores and flags between cores.
#pragma once
#include "broken_memory_kernels.h"

namespace {

// --- cube cores ----------------------------------------------------------------------------------------------------
GlobalTensor<half> GlobalHalf(float* data) {
    GlobalTensor<half> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<half*>(data), 8 * kCount);
    return tensor;
}
void CrossCoreOrder(bool broken, Memory m) {   // the cube core reads what vector core 0 wrote
    TPipe pipe;
    if ASCEND_IS_AIV {
        Work buffer;
        pipe.InitBuffer(buffer, 512);
        Duplicate(buffer.Get<half>(), half(1.0f), 256);
        Sync<HardEvent::V_MTE3>();
        if (GetSubBlockIdx() == 0) { DataCopy(GlobalHalf(m.output), buffer.Get<half>(), 256); }
        CrossCoreSetFlag<2, PIPE_MTE3>(0);
    } else {
        TBuf<TPosition::A1> buffer;
        pipe.InitBuffer(buffer, 512);
        if (!broken) { CrossCoreWaitFlag(0); }
        DataCopy(buffer.Get<half>(), GlobalHalf(m.output), Nd2NzParams(1, 16, 16, 0, 16, 16, 1, 0));
    }
}
void CrossCoreHang(bool broken, Memory) {   // one of two vector cores does not set the flag
    if ASCEND_IS_AIV {
        if (!broken || GetSubBlockIdx() == 0) { CrossCoreSetFlag<2, PIPE_MTE3>(0); }
    } else {
        CrossCoreWaitFlag(0);
    }
}
void CrossCoreId(bool broken, Memory) {
    if ASCEND_IS_AIV { CrossCoreSetFlag<2, PIPE_MTE3>(broken ? 11 : 10); }
}
void MixedSyncAll(bool broken, Memory) {
    if (broken) {
        SyncAll();
    } else {
        SyncAll<false>();
    }
}
void WrongMemory(bool broken, Memory) {   // a cube core has no unified buffer
    TPipe pipe;
    if ASCEND_IS_AIC {
        Work buffer;
        TBuf<TPosition::A1> cube;
        if (broken) { pipe.InitBuffer(buffer, 64); }
        pipe.InitBuffer(cube, 64);
    }
}
void MatrixProduct(Memory m, bool flag, uint16_t rows) {
    TPipe pipe;
    if ASCEND_IS_AIC {
        TBuf<TPosition::A1> l1;
        TBuf<TPosition::A2> left;
        TBuf<TPosition::B2> right;
        TBuf<TPosition::CO1> result;
        pipe.InitBuffer(l1, 512);
        pipe.InitBuffer(left, 512);
        pipe.InitBuffer(right, 512);
        pipe.InitBuffer(result, 1024);
        DataCopy(l1.Get<half>(), GlobalHalf(m.input), Nd2NzParams(1, 16, 16, 0, 16, 16, 1, 0));
        Sync<HardEvent::MTE2_MTE1>();
        LoadData2DParams load;
        load.repeatTimes = 1;
        LoadData(left.Get<half>(), l1.Get<half>(), load);
        LoadData(right.Get<half>(), l1.Get<half>(), load);
        if (flag) { Sync<HardEvent::MTE1_M>(); }
        MmadParams product;
        product.m = rows;
        product.n = product.k = 16;
        Mmad(result.Get<float>(), left.Get<half>(), right.Get<half>(), product);
        Sync<HardEvent::M_FIX>();
        FixpipeParamsV220 store;
        store.nSize = store.mSize = store.srcStride = 16;
        store.dstStride = 16;
        Fixpipe(Global(m.output), result.Get<float>(), store);
    }
}
void LoadThenMultiply(bool broken, Memory m) { MatrixProduct(m, !broken, 16); }
void SingleRow(bool broken, Memory m) { MatrixProduct(m, true, broken ? 1 : 16); }
void FractalAlignment(bool broken, Memory m) {
    TPipe pipe;
    if ASCEND_IS_AIC {
        TBuf<TPosition::A1> l1;
        TBuf<TPosition::A2> left;
        pipe.InitBuffer(l1, 512);
        pipe.InitBuffer(left, 2048);
        DataCopy(l1.Get<half>(), GlobalHalf(m.input), Nd2NzParams(1, 16, 16, 0, 16, 16, 1, 0));
        Sync<HardEvent::MTE2_MTE1>();
        LoadData2DParams load;
        load.repeatTimes = 1;
        LoadData(left.Get<half>()[broken ? 16 : 256], l1.Get<half>(), load);
    }
}

}  // namespace
