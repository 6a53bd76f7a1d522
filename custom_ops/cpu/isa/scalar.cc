// Plain C++ in groups of 4 lanes: the fallback for any processor.
#include "../rows.h"
#include "../work.h"

namespace pagegraft {
namespace {

struct Simd {
  static constexpr int W = 4;
  struct F {
    float lane[W];
  };
  static constexpr const char* kName = "scalar";
  static constexpr int kTileKeys = 2;
  static constexpr int kTileRows = 2;
  static constexpr int kWeighKeys = 2;      // keys of a few-rows PV step
  static constexpr bool kFours = false;
  static constexpr bool kWords = false;

  template <class Op>
  static F map(Op op) {
    F x;
    for (int i = 0; i < W; ++i) x.lane[i] = op(i);
    return x;
  }

  static F load(const float* p) {
    return map([&](int i) { return p[i]; });
  }
  static void store(float* p, F x) {
    for (int i = 0; i < W; ++i) p[i] = x.lane[i];
  }
  static F set1(float x) {
    return map([&](int) { return x; });
  }
  static F zero() { return set1(0.f); }
  static F add(F a, F b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F sub(F a, F b) {
    return map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static F mul(F a, F b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static F div(F a, F b) {
    return map([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static F fma(F a, F b, F c) {
    return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static F max(F a, F b) {
    return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static F min(F a, F b) {
    return map([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static F select_less(F a, F b, F x, F y) {
    return map([&](int i) { return a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]; });
  }
  static F scale_by_power(F x, F magic) {
    return map([&](int i) { return from_bits(bits_of(x.lane[i]) + (bits_of(magic.lane[i]) << 23)); });
  }
  static float reduce_add(F x) { return (x.lane[0] + x.lane[2]) + (x.lane[1] + x.lane[3]); }
  static float reduce_max(F x) {
    float top = x.lane[0];
    for (int i = 1; i < W; ++i) top = x.lane[i] > top ? x.lane[i] : top;
    return top;
  }

  static F load_float16(const std::uint8_t* p) {
    return map([&](int i) { return stored_value(Type::kFloat16, p, i); });
  }
  static F load_bfloat16(const std::uint8_t* p) {
    return map([&](int i) { return stored_value(Type::kBFloat16, p, i); });
  }
  static F load_int8(const std::uint8_t* p) {
    return map([&](int i) { return stored_value(Type::kInt8, p, i); });
  }
  static F load_float8(const std::uint8_t* p) {
    return map([&](int i) { return stored_value(Type::kFloat8, p, i); });
  }
  static F load_int4(const std::uint8_t* p) {
    return map([&](int i) { return stored_value(Type::kInt4, p, i); });
  }

  static F reduce_each(const F* a) {
    return map([&](int i) { return reduce_add(a[i]); });
  }
};

}  // namespace
}  // namespace pagegraft

#include "generic.inl"

namespace pagegraft {
const Isa* scalar_isa() { return &kIsa; }
}  // namespace pagegraft
