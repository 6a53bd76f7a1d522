// torch.ops.pagegraft.paged_attention on Ascend: hands the tensors to the operator's generated aclnn interface.
// Built with torch_npu and the installed operator package (README.md here); the schema is registered from Python.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "aclnn_paged_attention.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace {

using Optional = const c10::optional<at::Tensor>&;

constexpr double kAbsentScale = 3e38;   // as in op_kernel/paged_attention_tiling_data.h

aclDataType TypeOf(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return ACL_FLOAT;
        case at::kHalf: return ACL_FLOAT16;
        case at::kBFloat16: return ACL_BF16;
        case at::kChar: return ACL_INT8;
        case at::kInt: return ACL_INT32;
        default: TORCH_CHECK(false, "pagegraft::paged_attention has no kernel for ", tensor.scalar_type());
    }
}

// An aclTensor over a torch tensor's memory, freed at the end of its scope.
class View {
public:
    explicit View(const at::Tensor& tensor) {
        TORCH_CHECK(tensor.is_contiguous(), "pagegraft::paged_attention takes contiguous tensors");
        tensor_ = aclCreateTensor(tensor.sizes().data(), tensor.dim(), TypeOf(tensor), tensor.strides().data(), 0, ACL_FORMAT_ND,
                                  tensor.sizes().data(), tensor.dim(), tensor.data_ptr());
    }
    explicit View(Optional tensor) : View() {
        if (tensor.has_value()) { *this = View(*tensor); }
    }
    View() = default;
    View(const View&) = delete;
    View& operator=(View&& other) {
        std::swap(tensor_, other.tensor_);
        return *this;
    }
    ~View() {
        if (tensor_ != nullptr) { aclDestroyTensor(tensor_); }
    }
    aclTensor* get() const { return tensor_; }

private:
    aclTensor* tensor_ = nullptr;
};

at::Tensor PagedAttention(const at::Tensor& query, Optional key, Optional value, at::Tensor& key_cache, Optional value_cache,
                          const at::Tensor& cumulative, const at::Tensor& past, const at::Tensor& block_table, Optional cos, Optional sin,
                          Optional slots, Optional sink, Optional q_norm, Optional k_norm, Optional k_scale, Optional v_scale, Optional metadata,
                          int64_t num_heads, int64_t kv_num_heads, c10::optional<double> scale, double softcap, int64_t window,
                          int64_t is_causal, int64_t do_rotary, int64_t rotary_interleaved, int64_t rotary_offset, double epsilon,
                          c10::string_view k_quant, c10::string_view v_quant, c10::string_view k_dtype, c10::string_view v_dtype,
                          c10::string_view layout, int64_t v_head_size, at::ArrayRef<double> slopes) {
    TORCH_CHECK(value_cache.has_value(), "pagegraft::paged_attention on npu needs value_cache (no LATENT layout)");
    at::Tensor output = at::empty({query.size(0), num_heads * value_cache->size(3)}, query.options());
    const View in[] = {View(query), View(key), View(value), View(key_cache), View(value_cache), View(cumulative), View(past), View(block_table),
                       View(cos), View(sin), View(slots), View(sink), View(q_norm), View(k_norm), View(k_scale), View(v_scale), View(metadata)};
    const View out(output);
    const std::vector<float> values(slopes.begin(), slopes.end());
    aclFloatArray* list = aclCreateFloatArray(values.data(), values.size());
    std::string texts[] = {std::string(k_quant), std::string(v_quant), std::string(k_dtype), std::string(v_dtype), std::string(layout)};
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    const auto status = aclnnPagedAttentionGetWorkspaceSize(
        in[0].get(), in[1].get(), in[2].get(), in[3].get(), in[4].get(), in[5].get(), in[6].get(), in[7].get(), in[8].get(), in[9].get(),
        in[10].get(), in[11].get(), in[12].get(), in[13].get(), in[14].get(), in[15].get(), in[16].get(), num_heads, kv_num_heads,
        scale.value_or(kAbsentScale), softcap, window, is_causal, do_rotary, rotary_interleaved, rotary_offset, epsilon, texts[0].data(), texts[1].data(),
        texts[2].data(), texts[3].data(), texts[4].data(), v_head_size, list, out.get(), &bytes, &executor);
    TORCH_CHECK(status == 0, "aclnnPagedAttentionGetWorkspaceSize failed with ", status, "; the tiling's reason is in the log");
    at::Tensor workspace = at::empty({static_cast<int64_t>(bytes)}, query.options().dtype(at::kByte));
    const auto stream = c10_npu::getCurrentNPUStream().stream(false);
    const auto ran = aclnnPagedAttention(workspace.data_ptr(), bytes, executor, stream);
    aclDestroyFloatArray(list);
    TORCH_CHECK(ran == 0, "aclnnPagedAttention failed with ", ran);
    return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(pagegraft, PrivateUse1, m) { m.impl("paged_attention", &PagedAttention); }
