// Vector loads of stored elements, and the elementary functions of the softmax.
namespace pagegraft {
namespace {

using F = Simd::F;
constexpr std::int64_t W = Simd::W;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// Bytes that n stored elements take.
template <Type kType>
constexpr std::int64_t stored_bytes(std::int64_t n) {
  return kType == Type::kFloat32                                  ? 4 * n
         : kType == Type::kFloat16 || kType == Type::kBFloat16 ? 2 * n
         : kType == Type::kInt4                                   ? n / 2
                                                                  : n;
}

// W stored elements as float32, before any scale.
template <Type kType>
inline F load_stored(const std::uint8_t* p) {
  if constexpr (kType == Type::kFloat32) return Simd::load(reinterpret_cast<const float*>(p));
  if constexpr (kType == Type::kFloat16) return Simd::load_float16(p);
  if constexpr (kType == Type::kBFloat16) return Simd::load_bfloat16(p);
  if constexpr (kType == Type::kInt8) return Simd::load_int8(p);
  if constexpr (kType == Type::kFloat8) return Simd::load_float8(p);
  if constexpr (kType == Type::kInt4) return Simd::load_int4(p);
}

// Whether the few-rows loops load this type by fours of vectors, where whole ones are left of a row.
template <Type kType>
constexpr bool kInFours = Simd::kFours && kType == Type::kFloat8;

// The next four vectors of such a type.
template <class S = Simd>
inline void load_four(const std::uint8_t* p, F* out) {
  S::load_four_float8(p, out);
}

// The last n < W elements of a row; nothing behind the row's end is read. Lanes from n on hold a finite value.
template <Type kType>
inline F load_tail(const std::uint8_t* p, std::int64_t n) {
  alignas(64) std::uint8_t buffer[64] = {};
  std::memcpy(buffer, p, static_cast<std::size_t>(stored_bytes<kType>(kType == Type::kInt4 ? n + 1 : n)));
  return load_stored<kType>(buffer);
}

// e^x to 2 units in the last place; 0 below -87.3, which includes -inf; NaN stays NaN.
// Range reduction by powers of two, then the Taylor-like minimax polynomial of Cephes' expf.
inline F exp(F x) {
  const F lowest = Simd::set1(-87.3f);
  const F c = Simd::min(Simd::set1(88.3f), Simd::max(lowest, x));
  const F magic = Simd::fma(c, Simd::set1(1.44269504f), Simd::set1(12582912.f));
  const F n = Simd::sub(magic, Simd::set1(12582912.f));
  F r = Simd::fma(n, Simd::set1(-0.693359375f), c);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  F p = Simd::set1(1.9875691500e-4f);
  p = Simd::fma(p, r, Simd::set1(1.3981999507e-3f));
  p = Simd::fma(p, r, Simd::set1(8.3334519073e-3f));
  p = Simd::fma(p, r, Simd::set1(4.1665795894e-2f));
  p = Simd::fma(p, r, Simd::set1(1.6666665459e-1f));
  p = Simd::fma(p, r, Simd::set1(5.0000001201e-1f));
  p = Simd::fma(p, Simd::mul(r, r), Simd::add(r, Simd::set1(1.f)));
  const F y = Simd::fma(c, Simd::zero(), Simd::scale_by_power(p, magic));  // a NaN's bits do not survive the scaling
  return Simd::select_less(x, lowest, Simd::zero(), y);
}

inline F tanh(F x) {  // 1 - 2 / (e^2x + 1), from the side where the exponential cannot overflow
  const F e = exp(Simd::add(x, x));
  return Simd::sub(Simd::set1(1.f), Simd::div(Simd::set1(2.f), Simd::add(e, Simd::set1(1.f))));
}

inline float exp_scalar(float x) {
  alignas(64) float lanes[W];
  Simd::store(lanes, exp(Simd::set1(x)));
  return lanes[0];
}

// Factor that carries a sum from one running maximum to a later one; 0 from -inf, never exp(-inf + inf).
inline F carry(F from, F to) {
  return Simd::select_less(from, Simd::set1(-std::numeric_limits<float>::max()), Simd::zero(),
                           exp(Simd::sub(from, to)));
}

// A maximum to subtract: 0 in place of -inf, where every score is -inf and every exponential must be 0.
inline F finite_max(F m) { return Simd::select_less(m, Simd::set1(-std::numeric_limits<float>::max()), Simd::zero(), m); }

template <class Body>
inline void for_cache_type(Type type, Body body) {
  switch (type) {
    case Type::kFloat32:
      return body(std::integral_constant<Type, Type::kFloat32>());
    case Type::kFloat16:
      return body(std::integral_constant<Type, Type::kFloat16>());
    case Type::kBFloat16:
      return body(std::integral_constant<Type, Type::kBFloat16>());
    case Type::kInt8:
      return body(std::integral_constant<Type, Type::kInt8>());
    case Type::kFloat8:
      return body(std::integral_constant<Type, Type::kFloat8>());
    case Type::kInt4:
      return body(std::integral_constant<Type, Type::kInt4>());
  }
}

}  // namespace
}  // namespace pagegraft
