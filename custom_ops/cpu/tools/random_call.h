// A random call of the kernel core, for fuzz.cc: well formed by most odds, then broken in up to three places. Every tensor
// is an allocation of exactly its size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "../paged_attention.h"

namespace pagegraft {

class RandomCall {
 public:
  explicit RandomCall(std::uint64_t seed) : random_(seed) {}

  // Replaces the call by another.
  void make() {
    config_ = Config();
    call_ = Call();
    memory_.clear();
    make_config();
    make_tensors();
    for (std::int64_t i = one_of({0, 1, 1, 2, 3}); i > 0; --i) break_something();
  }

  const Config& config() const { return config_; }
  Call& call() { return call_; }
  std::int32_t* ints(std::size_t input) { return static_cast<std::int32_t*>(const_cast<void*>(call_.in[input].data)); }

 private:
  std::int64_t pick(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  std::int64_t one_of(std::initializer_list<std::int64_t> values) { return values.begin()[pick(static_cast<std::int64_t>(values.size()))]; }

  void make_config() {
    Config& c = config_;
    c.microsoft_domain = pick(4) == 0;
    c.compute = static_cast<Type>(pick(3));
    c.cache = static_cast<Type>(pick(6));
    c.kv_num_heads = one_of({1, 1, 2, 3});
    c.num_heads = c.kv_num_heads * one_of({1, 2, 4, 5, 9});
    c.has_scale = pick(2) == 0;
    c.scale = 0.3f;
    if (pick(4) == 0) c.softcap = 2.f;
    if (pick(3) == 0) c.window = one_of({1, 2, 7, 64, 1000});
    c.causal = pick(4) != 0;
    c.latent = pick(6) == 0;
    if (c.latent) {
      c.num_heads /= c.kv_num_heads;
      c.kv_num_heads = 1;
    }
    if (is_quantised(c.cache)) {
      const std::int64_t kinds = c.cache == Type::kInt8 && !c.microsoft_domain ? 3 : 2;
      c.k_quant = static_cast<Quant>(1 + pick(kinds));
      if (!c.latent) c.v_quant = static_cast<Quant>(1 + pick(kinds));
    }
    if (!c.microsoft_domain && pick(4) == 0) c.slopes.assign(static_cast<std::size_t>(c.num_heads), 0.1f);
  }

  void put(std::size_t input, std::initializer_list<std::int64_t> dims, std::int64_t size) {
    Tensor& t = call_.in[input];
    t.rank = 0;
    t.present = true;
    std::int64_t bytes = size;
    for (std::int64_t d : dims) {
      t.dims[t.rank++] = d;
      bytes *= d;
    }
    allocate(&t, bytes);
  }

  void allocate(Tensor* t, std::int64_t bytes) {
    memory_.emplace_back(new char[static_cast<std::size_t>(bytes > 0 ? bytes : 0)]);
    for (std::int64_t i = 0; i < bytes; ++i) memory_.back()[static_cast<std::size_t>(i)] = static_cast<char>(random_());
    t->data = memory_.back().get();
  }

  void make_tensors() {
    const Config& c = config_;
    const std::int64_t S = pick(4), B = one_of({1, 2, 4, 16, 64}), H = c.num_heads, G = c.kv_num_heads;
    const std::int64_t D = one_of({1, 3, 8, 16, 17, 32}), Dv = c.microsoft_domain || c.latent ? D : one_of({D, D, 5, 16});
    const std::int64_t compute = element_size(c.compute), cache = element_size(c.cache);
    const auto width = [&](std::int64_t n) { return c.cache == Type::kInt4 ? (n + 1) / 2 : n; };
    std::vector<std::int64_t> past, fresh;
    std::int64_t T = 0, longest = 1;
    for (std::int64_t i = 0; i < S; ++i) {
      past.push_back(one_of({0, 1, B - 1, B, 40, 70}));
      fresh.push_back(one_of({0, 1, 1, 2, 3, 12}));
      T += fresh.back();
      longest = std::max(longest, past.back() + fresh.back());
    }
    const std::int64_t M = (longest + B - 1) / B + pick(2), N = S * M + pick(3);
    const bool packed = !c.latent && pick(4) == 0;
    put(contract::kQuery, {T, packed ? H * D + G * (D + Dv) : H * D}, compute);
    if (!packed) put(contract::kKey, {T, G * D}, compute);
    if (!packed && !c.latent) put(contract::kValue, {T, G * Dv}, compute);
    put(contract::kKeyCache, {N, B, G, width(D)}, cache);
    if (!c.latent) put(contract::kValueCache, {N, B, G, width(Dv)}, cache);
    put(contract::kCumulativeSequenceLength, {S + 1}, 4);
    put(contract::kPastSeqlens, {S}, 4);
    put(contract::kBlockTable, {S, M}, 4);
    fill_lengths(past, fresh, N);
    make_options(S, T, D, longest);
    make_scales(N, B, D, Dv);
  }

  void fill_lengths(const std::vector<std::int64_t>& past, const std::vector<std::int64_t>& fresh, std::int64_t N) {
    std::int32_t* cumulative = ints(contract::kCumulativeSequenceLength);
    cumulative[0] = 0;
    for (std::size_t i = 0; i < past.size(); ++i) {
      cumulative[i + 1] = cumulative[i] + static_cast<std::int32_t>(fresh[i]);
      ints(contract::kPastSeqlens)[i] = static_cast<std::int32_t>(past[i]);
    }
    const Tensor& table = call_.in[contract::kBlockTable];
    for (std::int64_t i = 0; i < table.dims[0] * table.dims[1]; ++i) {
      ints(contract::kBlockTable)[i] = pick(20) == 0 || N == 0 ? -1 : static_cast<std::int32_t>(pick(N));
    }
  }

  void make_options(std::int64_t S, std::int64_t T, std::int64_t D, std::int64_t longest) {
    const std::int64_t compute = element_size(config_.compute), H = config_.num_heads;
    static_cast<void>(S);
    if (pick(3) == 0) {
      put(contract::kSlotMapping, {T}, 4);
      const Tensor& k = call_.in[contract::kKeyCache];
      const std::int64_t slots = k.dims[0] * k.dims[1];
      for (std::int64_t i = 0; i < T; ++i) {
        ints(contract::kSlotMapping)[i] = slots == 0 || pick(6) == 0 ? -1 : static_cast<std::int32_t>(pick(slots));
      }
    }
    if (pick(4) == 0) put(contract::kHeadSink, {H}, compute);
    if (pick(4) == 0) {
      put(contract::kQNormWeight, {D}, compute);
      put(contract::kKNormWeight, {D}, compute);
    }
    if (pick(3) == 0 && D > 1) {
      config_.rotary = true;
      config_.interleaved = pick(2) == 0;
      const std::int64_t half = 1 + pick(D / 2);
      if (D - 2 * half >= 8) config_.rotary_offset = 8;
      put(contract::kCosCache, {longest + pick(3), half}, compute);
      put(contract::kSinCache, {call_.in[contract::kCosCache].dims[0], half}, compute);
    }
  }

  void make_scales(std::int64_t N, std::int64_t B, std::int64_t D, std::int64_t Dv) {
    const std::int64_t G = config_.kv_num_heads;
    const auto scale = [&](std::size_t input, Quant quant, std::int64_t head) {
      if (quant == Quant::kPerTensor) put(input, {1}, 4);
      if (quant == Quant::kPerChannel) put(input, {G, 1, head}, 4);
      if (quant == Quant::kPerToken) put(input, {N, G, B}, 4);
    };
    scale(contract::kKScale, config_.k_quant, D);
    scale(contract::kVScale, config_.v_quant, Dv);
  }

  // Changes one thing: a dimension (with an allocation to match), a value, the presence of an input, or an attribute.
  void break_something() {
    const auto input = static_cast<std::size_t>(pick(contract::kInputCount));
    Tensor& t = call_.in[input];
    switch (pick(6)) {
      case 0:
        if (t.present && t.rank > 0) {
          t.dims[pick(t.rank)] = one_of({0, 1, 2, 3, 5, 16, 33});
          resize(input);
        }
        break;
      case 1:
        if (t.present) {
          t = Tensor();
        } else {
          put(input, {one_of({0, 1, 4}), one_of({0, 1, 8})}, 4);
        }
        break;
      case 2:
        if (t.present && t.rank > 1) {
          --t.rank;
          resize(input);
        }
        break;
      case 3:
      case 4:
        break_number();
        break;
      default:
        break_attribute();
    }
  }

  void resize(std::size_t input) {
    Tensor& t = call_.in[input];
    std::int64_t bytes = 4;  // at least the size of the type
    for (int i = 0; i < t.rank; ++i) bytes *= t.dims[i];
    allocate(&t, bytes);
  }

  void break_number() {
    static constexpr std::size_t kInts[] = {contract::kCumulativeSequenceLength, contract::kPastSeqlens,
                                            contract::kBlockTable, contract::kSlotMapping};
    const std::size_t input = kInts[pick(4)];
    const Tensor& t = call_.in[input];
    std::int64_t count = t.present ? 1 : 0;
    for (int i = 0; i < t.rank; ++i) count *= t.dims[i];
    if (count == 0) return;
    ints(input)[pick(count)] =
        static_cast<std::int32_t>(one_of({-1, -2, 0, 1, 3, 100, 1 << 20, INT32_MAX, INT32_MIN, pick(1 << 30)}));
  }

  void break_attribute() {
    Config& c = config_;
    switch (pick(9)) {
      case 0:
        c.num_heads = one_of({0, -1, 3, 7, 1 << 20});
        break;
      case 1:
        c.kv_num_heads = one_of({0, -2, 1, 5});
        break;
      case 2:
        c.window = one_of({0, -5, 1, INT64_MAX, INT64_MIN});
        break;
      case 3:
        c.rotary_offset = one_of({-8, 4, 8, 1 << 20});
        break;
      case 4:
        c.v_head_size = one_of({-1, 1, 8, 1000, INT64_MAX});
        break;
      case 5:
        c.rotary = !c.rotary;
        break;
      case 6:
        c.softcap = pick(2) == 0 ? -1.f : NAN;
        break;
      case 7:
        c.latent = !c.latent;
        break;
      default:
        c.k_quant = static_cast<Quant>(pick(4));
    }
  }

  std::mt19937_64 random_;
  Config config_;
  Call call_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

}  // namespace pagegraft
