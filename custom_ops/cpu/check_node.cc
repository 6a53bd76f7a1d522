// The rules of the contract that a node breaks by its attributes or by which inputs it has; known when the session is
// created.
#include <cmath>

#include "messages.h"
#include "paged_attention.h"

namespace pagegraft {
namespace {

using std::int64_t;
using std::to_string;

// Quantisation attributes against the cache type and the domain.
std::string check_quant(const Config& c) {
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
  const std::string quant = check_quant(c);
  if (!quant.empty()) return quant;
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

std::string check_inputs(const Config& c, const bool* present) {
  const auto missing = [](std::size_t input, const char* why) {
    return wrong(input, std::string("a tensor (") + why + ")", "nothing");
  };
  const auto surplus = [](std::size_t input, const char* why) {
    return wrong(input, std::string("nothing (") + why + ")", "a tensor");
  };
  if (c.latent) {
    for (std::size_t i : {contract::kValue, contract::kValueCache}) {
      if (present[i]) return surplus(i, "kv_cache_layout is LATENT");
    }
    if (!present[contract::kKey]) return missing(contract::kKey, "kv_cache_layout is LATENT");
  } else {
    if (!present[contract::kValueCache]) return missing(contract::kValueCache, "kv_cache_layout is SEPARATE");
    if (present[contract::kKey] != present[contract::kValue]) {
      return missing(present[contract::kKey] ? contract::kValue : contract::kKey, "key and value come together");
    }
  }
  if (present[contract::kQNormWeight] != present[contract::kKNormWeight]) {
    return missing(present[contract::kQNormWeight] ? contract::kKNormWeight : contract::kQNormWeight,
                   "q_norm_weight and k_norm_weight come together");
  }
  for (std::size_t i : {contract::kCosCache, contract::kSinCache}) {
    if (c.rotary && !present[i]) return missing(i, "do_rotary is 1");
    if (!c.rotary && present[i]) return surplus(i, "do_rotary is 0");
  }
  const struct {
    std::size_t input;
    Quant quant;
    const char* given;
    const char* none;
  } scales[] = {{contract::kKScale, c.k_quant, "k_quant_type is not NONE", "k_quant_type is NONE"},
                {contract::kVScale, c.v_quant, "v_quant_type is not NONE", "v_quant_type is NONE"}};
  for (const auto& rule : scales) {
    if (rule.quant != Quant::kNone && !present[rule.input]) return missing(rule.input, rule.given);
    if (rule.quant == Quant::kNone && present[rule.input]) return surplus(rule.input, rule.none);
  }
  return {};
}

}  // namespace pagegraft
