// Runs the operator's kernel under the emulator: tiling, global memory, launch, report.
#include "driver.h"

#include <cstdio>
#include <vector>

#include "kernel_operator.h"

#define PG_KERNEL_ARGUMENTS                                                                                                       \
    GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, \
        GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR

// The kernel's source is compiled once per pair of types, with its entry renamed.
extern "C" {
void paged_attention_half_half(PG_KERNEL_ARGUMENTS);
void paged_attention_half_int8(PG_KERNEL_ARGUMENTS);
void paged_attention_bf16_bf16(PG_KERNEL_ARGUMENTS);
void paged_attention_bf16_int8(PG_KERNEL_ARGUMENTS);
void paged_attention_float_float(PG_KERNEL_ARGUMENTS);
void paged_attention_float_int8(PG_KERNEL_ARGUMENTS);
#define PG_CUBE_ARGUMENTS \
    GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR
void paged_attention_cube_half(PG_CUBE_ARGUMENTS);
void paged_attention_cube_bf16(PG_CUBE_ARGUMENTS);
}

namespace {

using Kernel = void (*)(PG_KERNEL_ARGUMENTS);

const char* const kTensorNames[kPgTensorCount] = {
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table", "cos_cache",
    "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale", "attention_metadata", "output"};

Kernel Select(const PgCall& call) {
    static const Kernel same[] = {paged_attention_half_half, paged_attention_bf16_bf16, paged_attention_float_float};
    static const Kernel int8[] = {paged_attention_half_int8, paged_attention_bf16_int8, paged_attention_float_int8};
    return (call.problem.cacheBytes == 1 ? int8 : same)[call.inputType];
}

void Describe(PgReport* report, const char* check, const char* text) {
    std::snprintf(report->check, sizeof(report->check), "%s", check);
    std::snprintf(report->text, sizeof(report->text), "%s", text);
}

void Count(const emu::Launcher& launcher, emu::Machine& machine, PgReport* report) {
    const emu::Stats total = launcher.Total();
    report->gm_to_ub_bytes = static_cast<int64_t>(total.gm_to_ub_bytes);
    report->ub_to_gm_bytes = static_cast<int64_t>(total.ub_to_gm_bytes);
    report->vector_repeats = static_cast<int64_t>(total.vector_repeats);
    report->vector_instructions = static_cast<int64_t>(total.vector_instructions);
    report->copy_instructions = static_cast<int64_t>(total.copy_instructions);
    report->scalar_gm_reads = static_cast<int64_t>(total.scalar_gm_reads);
    report->scalar_ub_accesses = static_cast<int64_t>(total.scalar_ub_accesses);
    report->barriers = static_cast<int64_t>(total.barriers);
    report->cube_products = static_cast<int64_t>(total.cube_products);
    for (const auto& core : machine.cores) {
        const int64_t repeats = static_cast<int64_t>(core->stats.vector_repeats);
        if (repeats > report->busiest_core_repeats) { report->busiest_core_repeats = repeats; }
        if (core->ub_peak > report->ub_peak_bytes) { report->ub_peak_bytes = core->ub_peak; }
    }
}

}  // namespace

extern "C" int64_t pg_tiling_bytes() { return static_cast<int64_t>(sizeof(pagegraft::PagedAttentionTilingData)); }

extern "C" void pg_tiling(const PgCall* call, PgReport* report, pagegraft::PagedAttentionTilingData* data) {
    *report = PgReport();
    const pagegraft::TilingResult tiling = call->cube != 0 ? pagegraft::ComputeCubeTiling(call->problem, call->device)
                                                           : pagegraft::ComputeTiling(call->problem, call->device);
    *data = tiling.data;
    report->workspace_bytes = tiling.workspaceBytes;
    report->ub_used_bytes = tiling.ubUsedBytes;
    report->cores = tiling.data.usedCores;
    if (tiling.refusal != nullptr) { Describe(report, "refused", tiling.refusal); }
}

extern "C" void pg_run(const PgCall* call, PgReport* report) {
    pagegraft::PagedAttentionTilingData data;
    pg_tiling(call, report, &data);
    if (report->check[0] != 0) { return; }
    const bool cube = call->cube != 0;
    const uint32_t used = static_cast<uint32_t>(data.usedCores);
    emu::Launcher launcher(cube ? 2 * used : used, cube ? 2 : 1, cube);
    launcher.machine().mutant = call->mutant;
    for (int i = 0; i < kPgTensorCount; ++i) {
        const PgTensor& tensor = call->tensors[i];
        if (tensor.data == nullptr) { continue; }
        emu::GmRegion& region = launcher.AddRegion(kTensorNames[i], tensor.data, static_cast<uint64_t>(tensor.bytes));
        region.writable = i == kPgKeyCache || i == kPgValueCache || i == kPgOutput;
    }
    std::vector<uint8_t> workspace(static_cast<size_t>(report->workspace_bytes), 0xA5);
    emu::GmRegion& scratch = launcher.AddRegion("workspace", workspace.data(), workspace.size());
    scratch.writable = scratch.scratch = true;
    const auto at = [call](int index) { return static_cast<GM_ADDR>(call->tensors[index].data); };
    GM_ADDR const tiling = reinterpret_cast<GM_ADDR>(&data);
    const bool ran = launcher.Run([&] {
        if (cube) {
            const auto kernel = call->inputType == 1 ? paged_attention_cube_bf16 : paged_attention_cube_half;
            kernel(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(kPgSlotMapping), at(kPgHeadSink), at(kPgOutput), workspace.data(),
                   tiling);
        } else {
            Select(*call)(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12), at(13), at(14), at(15),
                          at(16), at(kPgOutput), at(kPgKeyCache), at(kPgValueCache), workspace.data(), tiling);
        }
    });
    Count(launcher, launcher.machine(), report);
    if (!ran) { Describe(report, launcher.violation().check.c_str(), launcher.violation().text.c_str()); }
}
