// PagedAttention on cube and vector cores together (launch type MIX_AIC_1_2): for prefill and wide query groups, float16
// and bfloat16 caches. Same arguments as paged_attention.cpp; the operator does not select it yet (see README.md).
#include "pa_cache_writer.h"
#include "pa_cube_vector.h"

using namespace pagegraft;

extern "C" __global__ __aicore__ void paged_attention_cube(
    GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR cumulative_sequence_length,
    GM_ADDR past_seqlens, GM_ADDR block_table, GM_ADDR slot_mapping, GM_ADDR head_sink, GM_ADDR output, GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    REGISTER_TILING_DEFAULT(PagedAttentionTilingData);
    GET_TILING_DATA_WITH_STRUCT(PagedAttentionTilingData, data, tiling);
    const TensorAddresses at = {query, key, value, key_cache, value_cache, cumulative_sequence_length, past_seqlens, block_table,
                                slot_mapping, head_sink, nullptr, nullptr, output, GetUserWorkspace(workspace)};
    const bool packed = key == nullptr;
    TPipe pipe;
    if ASCEND_IS_AIV {
        CacheWriter<DTYPE_QUERY, DTYPE_QUERY> writer;
        writer.Init(&pipe, &data, at, 2 * data.usedCores);
        writer.Write(packed ? query : key, key_cache, nullptr, data.headSize, data.keyStride, data.keyOffset, kQuantNone);
        writer.Write(packed ? query : value, value_cache, nullptr, data.vHeadSize, data.valueStride, data.valueOffset, kQuantNone);
        pipe.Reset();
    }
    PipeBarrier<PIPE_ALL>();
    SyncAll<false>();
    if ASCEND_IS_AIC {
        CubeSide<DTYPE_QUERY> cube;
        cube.Init(&pipe, &data, at);
        cube.Run();
    } else {
        VectorSide<DTYPE_QUERY> vector;
        vector.Init(&pipe, &data, at);
        vector.Run();
    }
}
