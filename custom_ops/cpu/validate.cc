// Every rule of the contract that a call can break, each with its message: the thing, what is expected, what was given.
#include <cmath>

#include "paged_attention.h"

namespace pagegraft {
namespace {

using std::to_string;
using std::int32_t;
using std::int64_t;

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank; ++i) text += (i ? ", " : "") + to_string(t.dims[i]);
  return text + "]";
}

std::string wrong(std::size_t input, const std::string& expected, const std::string& got) {
  return std::string("PagedAttention input '") + contract::kInputNames[input] + "': expected " + expected + ", got " +
         got;
}

std::string wrong_attribute(const char* name, const std::string& expected, const std::string& got) {
  return std::string("PagedAttention attribute '") + name + "': expected " + expected + ", got " + got;
}

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

std::string check_presence(const Config& c, const Call& call) {
  const auto& in = call.in;
  if (c.latent) {
    for (std::size_t i : {contract::kValue, contract::kValueCache}) {
      if (in[i].present) return wrong(i, "nothing (kv_cache_layout is LATENT)", "shape " + shape_text(in[i]));
    }
    if (!in[contract::kKey].present) return wrong(contract::kKey, "a tensor (kv_cache_layout is LATENT)", "nothing");
  } else {
    if (!in[contract::kValueCache].present) {
      return wrong(contract::kValueCache, "a tensor (kv_cache_layout is SEPARATE)", "nothing");
    }
    if (in[contract::kKey].present != in[contract::kValue].present) {
      const std::size_t missing = in[contract::kKey].present ? contract::kValue : contract::kKey;
      return wrong(missing, "key and value both, or neither (packed QKV)", "nothing");
    }
  }
  if (in[contract::kQNormWeight].present != in[contract::kKNormWeight].present) {
    const std::size_t missing = in[contract::kQNormWeight].present ? contract::kKNormWeight : contract::kQNormWeight;
    return wrong(missing, "q_norm_weight and k_norm_weight both, or neither", "nothing");
  }
  for (std::size_t i : {contract::kCosCache, contract::kSinCache}) {
    if (c.rotary && !in[i].present) return wrong(i, "a tensor (do_rotary is 1)", "nothing");
    if (!c.rotary && in[i].present) return wrong(i, "nothing (do_rotary is 0)", "shape " + shape_text(in[i]));
  }
  if (c.k_quant != Quant::kNone && !in[contract::kKScale].present) {
    return wrong(contract::kKScale, "a tensor (k_quant_type is not NONE)", "nothing");
  }
  if (c.k_quant == Quant::kNone && in[contract::kKScale].present) {
    return wrong(contract::kKScale, "nothing (k_quant_type is NONE)", "shape " + shape_text(in[contract::kKScale]));
  }
  if (c.v_quant != Quant::kNone && !in[contract::kVScale].present) {
    return wrong(contract::kVScale, "a tensor (v_quant_type is not NONE)", "nothing");
  }
  if (c.v_quant == Quant::kNone && in[contract::kVScale].present) {
    return wrong(contract::kVScale, "nothing (v_quant_type is NONE)", "shape " + shape_text(in[contract::kVScale]));
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
  if (s.N * s.B > INT32_MAX) {
    return wrong(contract::kKeyCache, "at most 2^31 - 1 slots, which int32 slot numbers can name",
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

std::string check_lengths(const Call& call, const Sizes& s) {
  const auto* cumulative = static_cast<const int32_t*>(call.in[contract::kCumulativeSequenceLength].data);
  const auto* past = static_cast<const int32_t*>(call.in[contract::kPastSeqlens].data);
  if (cumulative[0] != 0) {
    return wrong(contract::kCumulativeSequenceLength, "element 0 to be 0", to_string(cumulative[0]));
  }
  for (int64_t i = 0; i < s.S; ++i) {
    if (cumulative[i + 1] < cumulative[i]) {
      return wrong(contract::kCumulativeSequenceLength, "values that never decrease",
                   to_string(cumulative[i + 1]) + " after " + to_string(cumulative[i]) + " at element " +
                       to_string(i + 1));
    }
  }
  if (cumulative[s.S] != s.T) {
    return wrong(contract::kCumulativeSequenceLength, "its last element to be the number of tokens " + to_string(s.T),
                 to_string(cumulative[s.S]));
  }
  for (int64_t i = 0; i < s.S; ++i) {
    const int64_t total = int64_t{past[i]} + cumulative[i + 1] - cumulative[i];
    if (past[i] < 0) {
      return wrong(contract::kPastSeqlens, "values of at least 0", to_string(past[i]) + " for sequence " + to_string(i));
    }
    if (cumulative[i + 1] > cumulative[i] && total > s.M * s.B) {
      return wrong(contract::kBlockTable,
                   "a row of at least " + to_string((total + s.B - 1) / s.B) + " blocks for the " + to_string(total) +
                       " tokens of sequence " + to_string(i),
                   "shape " + shape_text(call.in[contract::kBlockTable]));
    }
  }
  return {};
}

std::string check_blocks(const Config& c, const Call& call, const Sizes& s) {
  const auto* cumulative = static_cast<const int32_t*>(call.in[contract::kCumulativeSequenceLength].data);
  const auto* past = static_cast<const int32_t*>(call.in[contract::kPastSeqlens].data);
  const auto* table = static_cast<const int32_t*>(call.in[contract::kBlockTable].data);
  for (int64_t i = 0; i < s.S; ++i) {
    const int64_t count = int64_t{cumulative[i + 1]} - cumulative[i];
    if (count == 0) continue;
    const int64_t end = past[i] + count;
    if (c.rotary && end > s.rotary_rows) {
      return wrong(contract::kCosCache,
                   "at least " + to_string(end) + " rows for the positions of sequence " + to_string(i),
                   to_string(s.rotary_rows) + " rows");
    }
    const int64_t begin = c.window > 0 && past[i] + 1 > c.window ? past[i] + 1 - c.window : 0;
    for (int64_t b = begin / s.B; b * s.B < end; ++b) {
      const int64_t id = table[i * s.M + b];
      if (id < contract::kUnmapped || id >= s.N) {
        return wrong(contract::kBlockTable,
                     "block ids from -1 to " + to_string(s.N - 1) + " in the visible range of sequence " + to_string(i),
                     to_string(id) + " at logical block " + to_string(b));
      }
    }
  }
  return {};
}

}  // namespace

std::string check_config(const Config& c) {
  if (c.num_heads < 1) return wrong_attribute("num_heads", "at least 1", to_string(c.num_heads));
  if (c.kv_num_heads < 1 || c.num_heads % c.kv_num_heads) {
    return wrong_attribute("kv_num_heads", "a divisor of num_heads=" + to_string(c.num_heads), to_string(c.kv_num_heads));
  }
  if (c.window < 1 && c.window != -1) {
    return wrong_attribute("local_window_size", "-1 (unused) or at least 1", to_string(c.window));
  }
  if (c.has_scale && !std::isfinite(c.scale)) return wrong_attribute("scale", "a finite number", to_string(c.scale));
  if (!(c.softcap >= 0.f) || !std::isfinite(c.softcap)) {
    return wrong_attribute("softcap", "0 (unused) or more", to_string(c.softcap));
  }
  if (!(c.epsilon >= 0.f)) return wrong_attribute("qk_norm_epsilon", "0 or more", to_string(c.epsilon));
  if (c.rotary_offset < 0 || c.rotary_offset % 8) {
    return wrong_attribute("rotary_offset", "a non-negative multiple of 8", to_string(c.rotary_offset));
  }
  const struct {
    const char* name;
    Quant quant;
    bool needed;
  } rules[] = {{"k_quant_type", c.k_quant, is_quantised(c.cache)},
               {"v_quant_type", c.v_quant, is_quantised(c.cache) && !c.latent}};
  for (const auto& rule : rules) {
    if (rule.needed && rule.quant == Quant::kNone) {
      return wrong_attribute(rule.name, "PER_TENSOR, PER_CHANNEL or PER_TOKEN for a quantised cache", "NONE");
    }
    if (!rule.needed && rule.quant != Quant::kNone) {
      return wrong_attribute(rule.name, "NONE (there is no quantised cache for it to describe)", "another value");
    }
    if (rule.quant == Quant::kPerToken && c.microsoft_domain) {
      return wrong_attribute(rule.name, "NONE, PER_TENSOR or PER_CHANNEL in domain com.microsoft",
                             "PER_TOKEN (only domain pagegraft has it)");
    }
    if (rule.quant == Quant::kPerToken && c.cache != Type::kInt8) {
      return wrong_attribute(rule.name, "PER_TOKEN only with int8 caches", "PER_TOKEN with another cache type");
    }
  }
  if (c.latent && c.kv_num_heads != 1) {
    return wrong_attribute("kv_num_heads", "1 (kv_cache_layout is LATENT)", to_string(c.kv_num_heads));
  }
  if (c.v_head_size < 0 || (c.v_head_size && !c.latent)) {
    return wrong_attribute("v_head_size", "0 unless kv_cache_layout is LATENT", to_string(c.v_head_size));
  }
  if (c.latent && c.v_head_size && !c.has_scale) {
    return wrong_attribute("scale", "a value when v_head_size is given", "nothing");
  }
  if (!c.slopes.empty() && c.microsoft_domain) {
    return wrong_attribute("alibi_slopes", "nothing in domain com.microsoft (only domain pagegraft has it)", "values");
  }
  if (!c.slopes.empty() && static_cast<int64_t>(c.slopes.size()) != c.num_heads) {
    return wrong_attribute("alibi_slopes", "num_heads=" + to_string(c.num_heads) + " values",
                           to_string(c.slopes.size()));
  }
  return {};
}

std::string check_shapes(const Config& c, const Call& call, Sizes* s) {
  std::string error = check_ranks(call);
  if (error.empty()) error = check_presence(c, call);
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

std::string check_values(const Config& c, const Call& call, const Sizes& s) {
  std::string error = check_lengths(call, s);
  if (error.empty()) error = check_blocks(c, call, s);
  if (!error.empty() || !call.in[contract::kSlotMapping].present) return error;
  const auto* slots = static_cast<const int32_t*>(call.in[contract::kSlotMapping].data);
  for (int64_t t = 0; t < s.T; ++t) {
    if (slots[t] < contract::kUnmapped || slots[t] >= s.N * s.B) {
      return wrong(contract::kSlotMapping, "slots from -1 to " + to_string(s.N * s.B - 1),
                   to_string(slots[t]) + " for token " + to_string(t));
    }
  }
  return {};
}

}  // namespace pagegraft
