// PagedAttention for the vector cores of Atlas A2 (910B): entry point.
//
// The operator project compiles this file once for each pair of types of the operator definition and passes them as
// DTYPE_QUERY and DTYPE_KEY_CACHE. Three phases with a barrier of all cores between them: new keys and values into the
// cache, attention, merge of split contexts. Vector cores only, but the barrier needs the mixed launch type.
#include "pa_attention.h"
#include "pa_cache_writer.h"

using namespace pagegraft;

extern "C" __global__ __aicore__ void paged_attention(
    GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR cumulative_sequence_length,
    GM_ADDR past_seqlens, GM_ADDR block_table, GM_ADDR cos_cache, GM_ADDR sin_cache, GM_ADDR slot_mapping, GM_ADDR head_sink,
    GM_ADDR q_norm_weight, GM_ADDR k_norm_weight, GM_ADDR k_scale, GM_ADDR v_scale, GM_ADDR attention_metadata, GM_ADDR output,
    GM_ADDR key_cache_out, GM_ADDR value_cache_out, GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    REGISTER_TILING_DEFAULT(PagedAttentionTilingData);
    GET_TILING_DATA_WITH_STRUCT(PagedAttentionTilingData, data, tiling);
    // The cache outputs are the cache inputs. Rotary embedding, q/k norms and the metadata hint are refused or ignored
    // by the tiling.
    (void)cos_cache, (void)sin_cache, (void)q_norm_weight, (void)k_norm_weight, (void)attention_metadata;
    (void)key_cache_out, (void)value_cache_out;
    const TensorAddresses at = {query, key, value, key_cache, value_cache, cumulative_sequence_length, past_seqlens, block_table,
                                slot_mapping, head_sink, k_scale, v_scale, output, GetUserWorkspace(workspace)};
    const bool packed = key == nullptr;
    TPipe pipe;
    {
        CacheWriter<DTYPE_QUERY, DTYPE_KEY_CACHE> writer;
        writer.Init(&pipe, &data, at, data.usedCores);
        writer.Write(packed ? query : key, key_cache, k_scale, data.headSize, data.keyStride, data.keyOffset, data.keyQuant);
        writer.Write(packed ? query : value, value_cache, v_scale, data.vHeadSize, data.valueStride, data.valueOffset, data.valueQuant);
    }
    pipe.Reset();
    PipeBarrier<PIPE_ALL>();
    SyncAll();
    Attention<DTYPE_QUERY, DTYPE_KEY_CACHE> attention;
    attention.Init(&pipe, &data, at);
    const bool split = attention.Attend();
    if (split) {
        PipeBarrier<PIPE_ALL>();
        SyncAll();
        attention.Combine();
    }
}
