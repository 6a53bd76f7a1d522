// Conversions between float32 and the stored element types, one element at a time, exact to the contract's rounding.
// Everything is internal to the file that includes it: the instruction-set leaves are compiled with their own flags, and
// a shared inline function would let the linker keep the copy that needs the newest processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace pagegraft {
namespace {

[[maybe_unused]] inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

[[maybe_unused]] inline float from_bits(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

[[maybe_unused]] inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

[[maybe_unused]] inline float bfloat16_to_float(std::uint16_t h) { return from_bits(std::uint32_t{h} << 16); }

[[maybe_unused]] inline std::uint16_t float_to_bfloat16(float x) {
  const std::uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);  // keep NaN a NaN
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

[[maybe_unused]] inline float float16_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal.
  const float x = from_bits(magnitude << 13) * from_bits(0x77800000u);
  return from_bits(sign | bits_of(x));
}

[[maybe_unused]] inline std::uint16_t float_to_float16(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (a >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (a < 0x38800000u) {  // subnormal: the addition of 0.5 rounds to multiples of 2^-24
    const float shifted = from_bits(a) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}

// e4m3fn: no infinity, NaN is 0x7f, largest 448, smallest subnormal 2^-9.
[[maybe_unused]] inline float float8_to_float(std::uint8_t c) {
  const std::uint32_t sign = std::uint32_t{c & 0x80u} << 24;
  const std::uint32_t magnitude = c & 0x7fu;
  if (magnitude == 0x7fu) return from_bits(sign | 0x7fc00000u);
  const float x = from_bits(magnitude << 20) * from_bits(0x7b800000u);  // 2^120: bias 7 to 127
  return from_bits(sign | bits_of(x));
}

[[maybe_unused]] inline std::uint8_t float_to_float8(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = (u >> 24) & 0x80u;
  const std::uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (a >= 0x43e00000u) return static_cast<std::uint8_t>(sign | 0x7eu);  // saturates at 448
  if (a < 0x3c800000u) {  // below 2^-6: adding 2^14 rounds to multiples of 2^-9
    const float shifted = from_bits(a) + 16384.f;
    return static_cast<std::uint8_t>(sign | (bits_of(shifted) - 0x46800000u));
  }
  const std::uint32_t r = (a + 0x7ffffu + ((a >> 20) & 1u) - 0x3c000000u) >> 20;
  return static_cast<std::uint8_t>(sign | (r > 0x7eu ? 0x7eu : r));
}

// Round half to even, clamped; NaN becomes 0. The addition of 1.5 * 2^23 leaves the integer in the low bits.
[[maybe_unused]] inline int round_clamped(float x, float low, float high) {
  if (!(x == x)) return 0;
  const float c = x < low ? low : x > high ? high : x;
  return static_cast<int>(bits_of(c + 12582912.f) & 0x7fffffu) - 0x400000;
}

}  // namespace
}  // namespace pagegraft
