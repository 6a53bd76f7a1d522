#include "step.h"

#include <cmath>

#include "rows.h"

namespace pagegraft {
namespace {

void widen(const Config& config, const Tensor& tensor, std::vector<float>* out) {
  if (!tensor.present) return;
  out->resize(static_cast<std::size_t>(tensor.dims[0]));
  load_row(config.compute, tensor.data, tensor.dims[0], out->data());
}

HeadSource source(const void* data, std::int64_t first, std::int64_t width, std::int64_t head, Type type) {
  const std::int64_t size = element_size(type);
  return {static_cast<const std::uint8_t*>(data) + first * size, width * size, head * size};
}

}  // namespace

Step::Step(const Config& config_, const Call& call_, const Sizes& sizes_)
    : config(config_), call(call_), sizes(sizes_) {
  const Sizes& s = sizes;
  const std::int64_t hd = s.H * s.D, gd = s.G * s.D, gdv = s.G * s.Dv;
  const void* packed = call.in[contract::kQuery].data;
  if (s.packed_qkv) {
    const std::int64_t width = hd + gd + gdv;
    query = source(packed, 0, width, s.D, config.compute);
    key = source(packed, hd, width, s.D, config.compute);
    value = source(packed, hd + gd, width, s.Dv, config.compute);
  } else {
    query = source(packed, 0, hd, s.D, config.compute);
    key = source(call.in[contract::kKey].data, 0, gd, s.D, config.compute);
    value = source(call.in[contract::kValue].data, 0, gdv, s.Dv, config.compute);
  }
  const auto width = [&](std::int64_t n) { return config.cache == Type::kInt4 ? (n + 1) / 2 : n; };
  kv.key = KvView::of(call.key_cache, config.cache, s.B, s.G, width(s.D));
  kv.value = config.latent ? kv.key : KvView::of(call.value_cache, config.cache, s.B, s.G, width(s.Dv));
  kv.block_size = s.B;
  kv.kv_heads = s.G;
  kv.k_scale = config.k_quant == Quant::kPerToken ? call.k_scale : nullptr;
  kv.v_scale = config.latent ? kv.k_scale : config.v_quant == Quant::kPerToken ? call.v_scale : nullptr;
  scale = config.has_scale ? config.scale : 1.f / std::sqrt(static_cast<float>(s.D));
  cumulative = static_cast<const std::int32_t*>(call.in[contract::kCumulativeSequenceLength].data);
  past = static_cast<const std::int32_t*>(call.in[contract::kPastSeqlens].data);
  table = static_cast<const std::int32_t*>(call.in[contract::kBlockTable].data);
  if (call.in[contract::kSlotMapping].present) {
    slots = static_cast<const std::int32_t*>(call.in[contract::kSlotMapping].data);
  }
  widen(config, call.in[contract::kHeadSink], &sinks);
  widen(config, call.in[contract::kQNormWeight], &q_norm);
  widen(config, call.in[contract::kKNormWeight], &k_norm);
}

}  // namespace pagegraft
