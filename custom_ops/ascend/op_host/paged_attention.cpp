// Definition of the operator PagedAttention: the contract of com.microsoft::PagedAttention version 1 with this kernel's
// types. The cache outputs carry the names of the cache inputs, which is how an in-place operator is declared.
#include "../op_kernel/paged_attention_tiling_data.h"
#include "paged_attention_host.h"

namespace ops {

class PagedAttention : public OpDef {
public:
    explicit PagedAttention(const char* name) : OpDef(name) {
        DefineTensors();
        DefineAttributes();
        this->SetInferShape(pagegraft::InferPagedAttentionShape).SetInferDataType(pagegraft::InferPagedAttentionDataType);
        this->AICore().SetTiling(pagegraft::TilePagedAttention);
        this->AICore().AddConfig("ascend910b");
        this->AICore().AddConfig("ascend910_93");
    }

private:
    using Types = std::vector<ge::DataType>;

    void Tensor(const char* name, bool required, const Types& types) {
        this->Input(name)
            .ParamType(required ? REQUIRED : OPTIONAL)
            .DataType(types)
            .Format(std::vector<ge::Format>(types.size(), ge::FORMAT_ND))
            .UnknownShapeFormat(std::vector<ge::Format>(types.size(), ge::FORMAT_ND));
    }
    void Result(const char* name, const Types& types) {
        this->Output(name)
            .ParamType(REQUIRED)
            .DataType(types)
            .Format(std::vector<ge::Format>(types.size(), ge::FORMAT_ND))
            .UnknownShapeFormat(std::vector<ge::Format>(types.size(), ge::FORMAT_ND));
    }

    // One column for each pair (query type, cache type) that the kernel is compiled for.
    void DefineTensors() {
        const Types compute = {ge::DT_FLOAT16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_FLOAT};
        const Types cache = {ge::DT_FLOAT16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_INT8, ge::DT_INT8, ge::DT_INT8};
        const Types index(compute.size(), ge::DT_INT32), scale(compute.size(), ge::DT_FLOAT);
        Tensor("query", true, compute);
        Tensor("key", false, compute);
        Tensor("value", false, compute);
        Tensor("key_cache", true, cache);
        Tensor("value_cache", false, cache);
        Tensor("cumulative_sequence_length", true, index);
        Tensor("past_seqlens", true, index);
        Tensor("block_table", true, index);
        Tensor("cos_cache", false, compute);
        Tensor("sin_cache", false, compute);
        Tensor("slot_mapping", false, index);
        Tensor("head_sink", false, compute);
        Tensor("q_norm_weight", false, compute);
        Tensor("k_norm_weight", false, compute);
        Tensor("k_scale", false, scale);
        Tensor("v_scale", false, scale);
        Tensor("attention_metadata", false, index);
        Result("output", compute);
        Result("key_cache", cache);
        Result("value_cache", cache);
    }

    void DefineAttributes() {
        this->Attr("num_heads").AttrType(REQUIRED).Int();
        this->Attr("kv_num_heads").AttrType(REQUIRED).Int();
        this->Attr("scale").AttrType(OPTIONAL).Float(pagegraft::kAbsentScale);
        this->Attr("softcap").AttrType(OPTIONAL).Float(0.0f);
        this->Attr("local_window_size").AttrType(OPTIONAL).Int(-1);
        this->Attr("is_causal").AttrType(OPTIONAL).Int(1);
        this->Attr("do_rotary").AttrType(OPTIONAL).Int(0);
        this->Attr("rotary_interleaved").AttrType(OPTIONAL).Int(0);
        this->Attr("rotary_offset").AttrType(OPTIONAL).Int(0);
        this->Attr("qk_norm_epsilon").AttrType(OPTIONAL).Float(1e-6f);
        this->Attr("k_quant_type").AttrType(OPTIONAL).String("NONE");
        this->Attr("v_quant_type").AttrType(OPTIONAL).String("NONE");
        this->Attr("k_cache_dtype").AttrType(OPTIONAL).String("");
        this->Attr("v_cache_dtype").AttrType(OPTIONAL).String("");
        this->Attr("kv_cache_layout").AttrType(OPTIONAL).String("SEPARATE");
        this->Attr("v_head_size").AttrType(OPTIONAL).Int(0);
        this->Attr("alibi_slopes").AttrType(OPTIONAL).ListFloat({});
    }
};

OP_ADD(PagedAttention);

}  // namespace ops
