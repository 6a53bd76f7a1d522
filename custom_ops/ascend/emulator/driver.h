// C interface of the emulator library (called from Python through ctypes).
#pragma once
#include <cstdint>

#include "../op_host/paged_attention_tiling_math.h"

extern "C" {

// One tensor argument of the kernel; data null: absent.
struct PgTensor {
    void* data;
    int64_t bytes;
};

// Indices of PgCall::tensors, in the order of the kernel's arguments before workspace and tiling.
enum PgTensorIndex {
    kPgQuery, kPgKey, kPgValue, kPgKeyCache, kPgValueCache, kPgCumulative, kPgPast, kPgBlockTable, kPgCos, kPgSin, kPgSlotMapping,
    kPgHeadSink, kPgQNorm, kPgKNorm, kPgKScale, kPgVScale, kPgMetadata, kPgOutput, kPgTensorCount
};

struct PgCall {
    pagegraft::Problem problem;
    pagegraft::Device device;
    PgTensor tensors[kPgTensorCount];
    int64_t inputType;  // of query and output: 0 float16, 1 bfloat16, 2 float32
    int64_t cube;       // 1: the mixed cube and vector kernel
    int64_t mutant;     // -1, or the synchronisation call to leave out (instrumented build only)
};

struct PgReport {
    char check[64];     // empty: ran to its end. "refused": not claimed. Otherwise the violated rule
    char text[640];
    int64_t cores, gm_to_ub_bytes, ub_to_gm_bytes, vector_repeats, vector_instructions, copy_instructions;
    int64_t scalar_gm_reads, scalar_ub_accesses, barriers, workspace_bytes, ub_used_bytes, busiest_core_repeats, ub_peak_bytes;
    int64_t cube_products;
};

void pg_run(const PgCall* call, PgReport* report);

// The tiling alone: refusal or sizes in the report.
void pg_tiling(const PgCall* call, PgReport* report, pagegraft::PagedAttentionTilingData* data);
int64_t pg_tiling_bytes();
}
