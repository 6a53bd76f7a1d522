// The CPU kernel of PagedAttention, free of onnxruntime: a call is described by plain structs and runs on whatever
// parallel loop the caller hands in. The contract is in ../spec.py; shape letters are those of that file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "contract.h"

namespace pagegraft {

enum class Type : int { kFloat32, kFloat16, kBFloat16, kInt8, kFloat8, kInt4 };
enum class Quant : int { kNone, kPerTensor, kPerChannel, kPerToken };

inline bool is_quantised(Type type) { return type == Type::kInt8 || type == Type::kFloat8 || type == Type::kInt4; }

// Bytes of one stored element; packed int4 is counted in bytes of its last dimension.
inline std::int64_t element_size(Type type) {
  return type == Type::kFloat32 ? 4 : type == Type::kFloat16 || type == Type::kBFloat16 ? 2 : 1;
}

// The attributes of a node, with its compute and cache types. Fixed when the session is created.
struct Config {
  bool microsoft_domain = false;
  Type compute = Type::kFloat32;
  Type cache = Type::kFloat32;
  std::int64_t num_heads = 0;
  std::int64_t kv_num_heads = 0;
  bool has_scale = false;
  float scale = 0.f;
  float softcap = 0.f;
  std::int64_t window = -1;
  bool causal = true;
  bool rotary = false;
  bool interleaved = false;
  std::int64_t rotary_offset = 0;
  float epsilon = 1e-6f;
  Quant k_quant = Quant::kNone;
  Quant v_quant = Quant::kNone;
  bool latent = false;
  std::int64_t v_head_size = 0;
  std::vector<float> slopes;
};

// One input. `data` null with an empty `dims` means absent.
struct Tensor {
  const void* data = nullptr;
  std::int64_t dims[4] = {0, 0, 0, 0};
  int rank = 0;
  bool present = false;
};

// The inputs of one call by contract index, and what it writes. Output sizes follow from `Sizes`.
struct Call {
  Tensor in[contract::kInputCount];
  void* output = nullptr;
  void* key_cache = nullptr;
  void* value_cache = nullptr;  // the key cache when LATENT
  float* k_scale = nullptr;     // written only when PER_TOKEN
  float* v_scale = nullptr;
};

// Sizes of one call, found and checked by `check_shapes`.
struct Sizes {
  std::int64_t T = 0, S = 0, N = 0, B = 0, M = 0;
  std::int64_t H = 0, G = 0, D = 0, Dv = 0;
  std::int64_t rotary_rows = 0, rotary_dim = 0;
  bool packed_qkv = false;
};

// The caller's parallel loop: runs body(data, i) for i in [0, count), in any order, on any threads, and returns when
// all have ended.
struct Parallel {
  void (*run)(void* context, std::int64_t count, void (*body)(void*, std::size_t), void* data);
  void* context;
};

// Each check returns an empty string, or what is wrong: the thing, what is expected, what was given.
std::string check_config(const Config& config);
std::string check_inputs(const Config& config, const bool* present);  // [kInputCount]
std::string check_shapes(const Config& config, const Call& call, Sizes* sizes);
std::string check_values(const Config& config, const Call& call, const Sizes& sizes);

// Writes the new keys and values, then attends. Shapes and values must have been checked. Returns an empty string, or
// why it could not run (memory).
std::string run(const Config& config, const Call& call, const Sizes& sizes, const Parallel& parallel);

// Name of the instruction set the kernel runs on in this process, or what is wrong with the request for one.
const char* isa_name();
std::string isa_error();

}  // namespace pagegraft
