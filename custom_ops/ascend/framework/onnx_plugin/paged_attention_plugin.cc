// ONNX node -> GE operator, for atc: com.microsoft::PagedAttention and pagegraft::PagedAttention, version 1.
#include <map>
#include <string>

#include "attribute_json.h"
#include "graph/operator.h"
#include "register/register.h"

namespace domi {
namespace {

const char* const kInts[] = {"num_heads", "kv_num_heads", "local_window_size", "is_causal", "do_rotary", "rotary_interleaved",
                             "rotary_offset", "v_head_size"};
const char* const kFloats[] = {"scale", "softcap", "qk_norm_epsilon"};
const char* const kStrings[] = {"k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype", "kv_cache_layout"};

}  // namespace

// Attributes that the node does not have keep the defaults of the operator definition.
Status ParsePagedAttention(const ge::Operator& source, ge::Operator& target) {
    ge::AscendString text;
    std::map<std::string, pagegraft::OnnxAttribute> attributes;
    if (source.GetAttr("attribute", text) != ge::GRAPH_SUCCESS || !pagegraft::AttributeReader(text.GetString()).Read(attributes)) {
        return FAILED;
    }
    if (attributes.count("num_heads") == 0 || attributes.count("kv_num_heads") == 0) { return FAILED; }
    for (const char* name : kInts) {
        if (attributes.count(name) != 0) { target.SetAttr(name, attributes[name].Int()); }
    }
    for (const char* name : kFloats) {
        if (attributes.count(name) != 0) { target.SetAttr(name, attributes[name].Float()); }
    }
    for (const char* name : kStrings) {
        if (attributes.count(name) != 0) { target.SetAttr(name, ge::AscendString(attributes[name].Text("s").c_str())); }
    }
    if (attributes.count("alibi_slopes") != 0) { target.SetAttr("alibi_slopes", attributes["alibi_slopes"].Floats()); }
    return SUCCESS;
}

REGISTER_CUSTOM_OP("PagedAttention")
    .FrameworkType(ONNX)
    .OriginOpType({ge::AscendString("com.microsoft::1::PagedAttention"), ge::AscendString("pagegraft::1::PagedAttention")})
    .ParseParamsByOperatorFn(ParsePagedAttention)
    .ImplyType(ImplyType::TVM);

}  // namespace domi
