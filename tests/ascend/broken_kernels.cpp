// Small kernels, each in a right and a broken form; the broken form must trip one check of the emulator.
#include <cstdio>
#include <string>
#include <vector>

#include "broken_cube_kernels.h"
#include "broken_order_kernels.h"

namespace {

struct Case {
    const char* name;
    void (*kernel)(bool broken, Memory memory);
    const char* check;
    uint32_t cores = 1, per_group = 1;
    bool cubes = false;
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
    {"cross-core-order", CrossCoreOrder, "happens-before", 2, 2, true},
    {"cross-core-hang", CrossCoreHang, "cross-core", 2, 2, true},
    {"cross-core-id", CrossCoreId, "flag-range", 2, 2, true},
    {"mixed-syncall", MixedSyncAll, "sync-all", 2, 2, true},
    {"wrong-memory", WrongMemory, "ub-capacity", 2, 2, true},
    {"mte1-m", LoadThenMultiply, "happens-before", 2, 2, true},
    {"single-row", SingleRow, "field-range", 2, 2, true},
    {"fractal-alignment", FractalAlignment, "ub-alignment", 2, 2, true},
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
    emu::Launcher launcher(c.cores, c.per_group, c.cubes);
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
