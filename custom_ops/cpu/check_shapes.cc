// The rules of the contract that a call breaks by the shapes of its inputs; also finds the sizes of the call.
#include <initializer_list>

#include "messages.h"
#include "paged_attention.h"

namespace pagegraft {
namespace {

using std::int64_t;
using std::to_string;

bool has_shape(const Tensor& t, std::initializer_list<int64_t> dims) {
  if (t.rank != static_cast<int>(dims.size())) return false;
  int i = 0;
  for (int64_t d : dims) {
    if (t.dims[i++] != d) return false;
  }
  return true;
}

std::string dims_text(std::initializer_list<int64_t> dims) {
  std::string text;
  for (int64_t d : dims) text += (text.empty() ? "" : ", ") + to_string(d);
  return "[" + text + "]";
}

// Logical head sizes that a stored last dimension can hold.
bool stored_width_fits(int64_t head_size, int64_t width, Type cache) {
  return width == (cache == Type::kInt4 ? (head_size + 1) / 2 : head_size);
}

std::string check_ranks(const Call& call) {
  static constexpr struct {
    std::size_t input;
    int rank;
  } kRanks[] = {
      {contract::kQuery, 2},        {contract::kKey, 2},
      {contract::kValue, 2},        {contract::kKeyCache, 4},
      {contract::kValueCache, 4},   {contract::kCumulativeSequenceLength, 1},
      {contract::kPastSeqlens, 1},  {contract::kBlockTable, 2},
      {contract::kCosCache, 2},     {contract::kSinCache, 2},
      {contract::kSlotMapping, 1},  {contract::kHeadSink, 1},
      {contract::kQNormWeight, 1},  {contract::kKNormWeight, 1},
      {contract::kAttentionMetadata, 1},
  };
  for (const auto& rule : kRanks) {
    const Tensor& t = call.in[rule.input];
    if (t.present && t.rank != rule.rank) {
      return wrong(rule.input, "rank " + to_string(rule.rank), "shape " + shape_text(t));
    }
  }
  for (std::size_t i : {contract::kQuery, contract::kKeyCache, contract::kCumulativeSequenceLength,
                        contract::kPastSeqlens, contract::kBlockTable}) {
    if (!call.in[i].present) return wrong(i, "a tensor", "nothing");
  }
  return {};
}

// Packed QKV with int4 caches: the stored widths leave one bit of each head size open; the query's width decides.
bool solve_packed(const Config& c, int64_t query_width, int64_t k_width, int64_t v_width, Sizes* s) {
  const bool packed = c.cache == Type::kInt4;
  const int64_t ks[] = {packed ? 2 * k_width : k_width, packed ? 2 * k_width - 1 : k_width};
  const int64_t vs[] = {packed ? 2 * v_width : v_width, packed ? 2 * v_width - 1 : v_width};
  for (const bool equal : {true, false}) {
    for (int64_t d : ks) {
      for (int64_t dv : vs) {
        if ((d == dv) == equal && query_width == (c.num_heads + c.kv_num_heads) * d + c.kv_num_heads * dv) {
          s->D = d;
          s->Dv = dv;
          return true;
        }
      }
    }
  }
  return false;
}

std::string find_head_sizes(const Config& c, const Call& call, Sizes* s) {
  const Tensor& query = call.in[contract::kQuery];
  const Tensor& key = call.in[contract::kKey];
  const Tensor& value = call.in[contract::kValue];
  const Tensor& key_cache = call.in[contract::kKeyCache];
  const int64_t width = query.dims[1];
  s->packed_qkv = !key.present;
  if (s->packed_qkv) {
    if (!solve_packed(c, width, key_cache.dims[3], call.in[contract::kValueCache].dims[3], s)) {
      return wrong(contract::kQuery,
                   "packed QKV of width num_heads*D + kv_num_heads*(D + Dv) with the head sizes of caches " +
                       shape_text(key_cache) + " and " + shape_text(call.in[contract::kValueCache]),
                   "shape " + shape_text(query));
    }
    return {};
  }
  if (width < c.num_heads || width % c.num_heads) {
    return wrong(contract::kQuery, "a width that is a multiple of num_heads=" + to_string(c.num_heads),
                 "shape " + shape_text(query));
  }
  s->D = width / c.num_heads;
  if (!has_shape(key, {s->T, s->G * s->D})) {
    return wrong(contract::kKey, "shape " + dims_text({s->T, s->G * s->D}), "shape " + shape_text(key));
  }
  if (c.latent) {
    s->Dv = c.v_head_size ? c.v_head_size : s->D;
    if (s->Dv > s->D) {
      return wrong_attribute("v_head_size", "at most the head size " + to_string(s->D), to_string(s->Dv));
    }
    return {};
  }
  if (value.dims[0] != s->T || value.dims[1] < s->G || value.dims[1] % s->G) {
    return wrong(contract::kValue, "shape [" + to_string(s->T) + ", a multiple of kv_num_heads=" + to_string(s->G) + "]",
                 "shape " + shape_text(value));
  }
  s->Dv = value.dims[1] / s->G;
  return {};
}

std::string check_caches(const Config& c, const Call& call, const Sizes& s) {
  const Tensor& key_cache = call.in[contract::kKeyCache];
  const Tensor& value_cache = call.in[contract::kValueCache];
  if (s.B < 1 || s.B > contract::kMaxBlockSize || (s.B & (s.B - 1))) {
    return wrong(contract::kKeyCache,
                 "a block size (dimension 1) that is a power of two up to " + to_string(contract::kMaxBlockSize),
                 "shape " + shape_text(key_cache));
  }
  if (key_cache.dims[2] != s.G || !stored_width_fits(s.D, key_cache.dims[3], c.cache)) {
    return wrong(contract::kKeyCache,
                 "shape [N, B, " + to_string(s.G) + ", " + to_string(c.cache == Type::kInt4 ? (s.D + 1) / 2 : s.D) + "]",
                 "shape " + shape_text(key_cache));
  }
  if (c.latent) return {};
  const int64_t v_width = c.cache == Type::kInt4 ? (s.Dv + 1) / 2 : s.Dv;
  if (!has_shape(value_cache, {s.N, s.B, s.G, v_width})) {
    return wrong(contract::kValueCache, "shape " + dims_text({s.N, s.B, s.G, v_width}), "shape " + shape_text(value_cache));
  }
  if (c.microsoft_domain && s.D != s.Dv) {
    return wrong(contract::kValueCache,
                 "the shape of key_cache (head sizes may differ only in domain pagegraft)",
                 "shape " + shape_text(value_cache));
  }
  return {};
}

std::string check_scale(std::size_t input, Quant quant, const Tensor& t, int64_t head_size, const Sizes& s) {
  if (quant == Quant::kPerTensor && !has_shape(t, {1})) return wrong(input, "shape [1]", "shape " + shape_text(t));
  if (quant == Quant::kPerChannel && !has_shape(t, {s.G, 1, head_size})) {
    return wrong(input, "shape " + dims_text({s.G, 1, head_size}), "shape " + shape_text(t));
  }
  if (quant == Quant::kPerToken && !has_shape(t, {s.N, s.G, s.B})) {
    return wrong(input, "shape " + dims_text({s.N, s.G, s.B}), "shape " + shape_text(t));
  }
  return {};
}

std::string check_vectors(const Config& c, const Call& call, const Sizes& s) {
  const struct {
    std::size_t input;
    int64_t length;
  } rules[] = {
      {contract::kCumulativeSequenceLength, s.S + 1}, {contract::kSlotMapping, s.T}, {contract::kHeadSink, s.H},
      {contract::kQNormWeight, s.D},                  {contract::kKNormWeight, s.D},
  };
  for (const auto& rule : rules) {
    const Tensor& t = call.in[rule.input];
    if (t.present && t.dims[0] != rule.length) {
      return wrong(rule.input, "shape " + dims_text({rule.length}), "shape " + shape_text(t));
    }
  }
  const Tensor& metadata = call.in[contract::kAttentionMetadata];
  if (metadata.present && metadata.dims[0] != 2 && metadata.dims[0] != 3) {
    return wrong(contract::kAttentionMetadata, "shape [2] or [3]", "shape " + shape_text(metadata));
  }
  std::string error = check_scale(contract::kKScale, c.k_quant, call.in[contract::kKScale], s.D, s);
  if (error.empty()) error = check_scale(contract::kVScale, c.v_quant, call.in[contract::kVScale], s.Dv, s);
  return error;
}

std::string check_rotary(const Config& c, const Call& call, Sizes* s) {
  if (!c.rotary) return {};
  const Tensor& cos = call.in[contract::kCosCache];
  const Tensor& sin = call.in[contract::kSinCache];
  if (cos.dims[1] < 1 || c.rotary_offset + 2 * cos.dims[1] > s->D) {
    return wrong(contract::kCosCache,
                 "shape [rows, rotary_dim/2] with rotary_offset=" + to_string(c.rotary_offset) +
                     " + rotary_dim within the head size " + to_string(s->D),
                 "shape " + shape_text(cos));
  }
  if (!has_shape(sin, {cos.dims[0], cos.dims[1]})) {
    return wrong(contract::kSinCache, "the shape of cos_cache, " + shape_text(cos), "shape " + shape_text(sin));
  }
  s->rotary_rows = cos.dims[0];
  s->rotary_dim = 2 * cos.dims[1];
  return {};
}

}  // namespace

std::string check_shapes(const Config& c, const Call& call, Sizes* s) {
  std::string error = check_ranks(call);
  bool present[contract::kInputCount];
  for (std::size_t i = 0; i < contract::kInputCount; ++i) present[i] = call.in[i].present;
  if (error.empty()) error = check_inputs(c, present);
  if (!error.empty()) return error;
  const Tensor& key_cache = call.in[contract::kKeyCache];
  const Tensor& table = call.in[contract::kBlockTable];
  s->T = call.in[contract::kQuery].dims[0];
  s->S = call.in[contract::kPastSeqlens].dims[0];
  s->N = key_cache.dims[0];
  s->B = key_cache.dims[1];
  s->M = table.dims[1];
  s->H = c.num_heads;
  s->G = c.kv_num_heads;
  if (table.dims[0] != s->S) {
    return wrong(contract::kBlockTable, "one row for each of the " + to_string(s->S) + " sequences",
                 "shape " + shape_text(table));
  }
  error = find_head_sizes(c, call, s);
  if (error.empty()) error = check_caches(c, call, *s);
  if (error.empty()) error = check_vectors(c, call, *s);
  if (error.empty()) error = check_rotary(c, call, s);
  return error;
}

}  // namespace pagegraft
