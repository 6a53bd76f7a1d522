// Reads a node's attributes into a Config; every refusal happens here, when the session is created.
#include "node_config.h"

#include <cstring>

namespace pagegraft {
namespace {

using ort::Api;
using ort::KernelInfo;
using ort::Status;

class Reader {
 public:
  Reader(const Api* api, const KernelInfo* info) : api_(api), info_(info) {}

  std::int64_t integer(const char* name, std::int64_t fallback) {
    std::int64_t value = fallback;
    return take(api_->KernelInfoGetAttribute_int64(info_, name, &value), name) ? value : fallback;
  }

  float number(const char* name, float fallback, bool* given = nullptr) {
    float value = fallback;
    const bool ok = take(api_->KernelInfoGetAttribute_float(info_, name, &value), name);
    if (given != nullptr) *given = ok;
    return ok ? value : fallback;
  }

  std::string text(const char* name) {
    std::size_t size = 0;
    if (!take(api_->KernelInfoGetAttribute_string(info_, name, nullptr, &size), name) || size == 0) return {};
    std::string value(size, '\0');
    if (!take(api_->KernelInfoGetAttribute_string(info_, name, &value[0], &size), name)) return {};
    value.resize(std::strlen(value.c_str()));  // the size counts a terminating zero
    return value;
  }

  std::vector<float> numbers(const char* name) {
    std::size_t size = 0;
    if (!take(api_->KernelInfoGetAttributeArray_float(info_, name, nullptr, &size), name) || size == 0) return {};
    std::vector<float> values(size);
    if (!take(api_->KernelInfoGetAttributeArray_float(info_, name, values.data(), &size), name)) return {};
    return values;
  }

  // The first attribute that is there with another type than the contract's.
  const std::string& error() const { return error_; }

 private:
  bool take(Status* status, const char* name) {
    if (status == nullptr) return true;
    // An attribute that is absent and one of another type are told apart by onnxruntime's text alone.
    const char* text = api_->GetErrorMessage(status);
    const bool other_type = std::strstr(text, "don't match") != nullptr || std::strstr(text, "expected to have type");
    if (error_.empty() && other_type) {
      error_ = std::string("PagedAttention attribute '") + name + "': expected another type (" + text + ")";
    }
    api_->ReleaseStatus(status);
    return false;
  }

  const Api* api_;
  const KernelInfo* info_;
  std::string error_;
};

std::string refuse(const char* name, const std::string& expected, const std::string& got) {
  return std::string("PagedAttention attribute '") + name + "': expected " + expected + ", got '" + got + "'";
}

std::string read_flag(Reader* reader, const char* name, std::int64_t fallback, bool* out) {
  const std::int64_t value = reader->integer(name, fallback);
  *out = value != 0;
  return value == 0 || value == 1 ? "" : refuse(name, "0 or 1", std::to_string(value));
}

std::string read_quant(Reader* reader, const char* name, Quant* out) {
  const std::string value = reader->text(name);
  if (value.empty() || value == "NONE") {
    *out = Quant::kNone;
  } else if (value == "PER_TENSOR") {
    *out = Quant::kPerTensor;
  } else if (value == "PER_CHANNEL") {
    *out = Quant::kPerChannel;
  } else if (value == "PER_TOKEN") {
    *out = Quant::kPerToken;
  } else {
    return refuse(name, "NONE, PER_TENSOR, PER_CHANNEL or PER_TOKEN", value);
  }
  return {};
}

const char* cache_dtype_name(Type type) {
  switch (type) {
    case Type::kFloat32:
      return "float32";
    case Type::kFloat16:
      return "float16";
    case Type::kBFloat16:
      return "bfloat16";
    case Type::kInt8:
      return "int8";
    case Type::kFloat8:
      return "float8e4m3fn";
    default:
      return "int4";
  }
}

std::string check_cache_dtype(Reader* reader, const char* name, Type cache, bool used) {
  const std::string value = reader->text(name);
  const std::string expected = cache_dtype_name(cache);
  if (!used) return value.empty() ? "" : refuse(name, "'' (kv_cache_layout is LATENT)", value);
  if (cache == Type::kInt4 && value != expected) {
    return refuse(name, "int4 (the only type that this kernel reads from a uint8 cache)", value);
  }
  if (!value.empty() && value != expected) {
    return refuse(name, "'' or " + expected + ", the type of the cache tensor", value);
  }
  return {};
}

std::string read_flags_and_quant(Reader* reader, Config* config) {
  std::string error = read_flag(reader, "is_causal", 1, &config->causal);
  if (error.empty()) error = read_flag(reader, "do_rotary", 0, &config->rotary);
  if (error.empty()) error = read_flag(reader, "rotary_interleaved", 0, &config->interleaved);
  if (error.empty()) error = read_quant(reader, "k_quant_type", &config->k_quant);
  if (error.empty()) error = read_quant(reader, "v_quant_type", &config->v_quant);
  if (!error.empty()) return error;
  const std::string layout = reader->text("kv_cache_layout");
  if (!layout.empty() && layout != "SEPARATE" && layout != "LATENT") {
    return refuse("kv_cache_layout", "SEPARATE or LATENT", layout);
  }
  config->latent = layout == "LATENT";
  error = check_cache_dtype(reader, "k_cache_dtype", config->cache, true);
  if (error.empty()) error = check_cache_dtype(reader, "v_cache_dtype", config->cache, !config->latent);
  return error;
}

}  // namespace

std::string read_config(const Api* api, const KernelInfo* info, Config* config) {
  Reader reader(api, info);
  config->num_heads = reader.integer("num_heads", 0);
  config->kv_num_heads = reader.integer("kv_num_heads", 0);
  config->scale = reader.number("scale", 0.f, &config->has_scale);
  config->softcap = reader.number("softcap", 0.f);
  config->window = reader.integer("local_window_size", -1);
  config->rotary_offset = reader.integer("rotary_offset", 0);
  config->epsilon = reader.number("qk_norm_epsilon", 1e-6f);
  config->v_head_size = reader.integer("v_head_size", 0);
  config->slopes = reader.numbers("alibi_slopes");
  const std::string error = read_flags_and_quant(&reader, config);
  if (!reader.error().empty()) return reader.error();
  return error.empty() ? check_config(*config) : error;
}

}  // namespace pagegraft
