// What happens to one token's head vector outside of the attention itself: loading, RMSNorm, rotary, storing,
// quantising. Plain loops that the compiler vectorises for the flags of the file that includes them; internal to it.
#pragma once

#include <cmath>

#include "paged_attention.h"
#include "scalar_types.h"

namespace pagegraft {
namespace {

[[maybe_unused]] void load_row(Type type, const void* source, std::int64_t n, float* out) {
  if (type == Type::kFloat32) {
    std::memcpy(out, source, static_cast<std::size_t>(n) * 4);
  } else if (type == Type::kFloat16) {
    const auto* in = static_cast<const std::uint16_t*>(source);
    for (std::int64_t i = 0; i < n; ++i) out[i] = float16_to_float(in[i]);
  } else {
    const auto* in = static_cast<const std::uint16_t*>(source);
    for (std::int64_t i = 0; i < n; ++i) out[i] = bfloat16_to_float(in[i]);
  }
}

[[maybe_unused]] void store_row(Type type, const float* in, std::int64_t n, void* target) {
  if (type == Type::kFloat32) {
    std::memcpy(target, in, static_cast<std::size_t>(n) * 4);
  } else if (type == Type::kFloat16) {
    auto* out = static_cast<std::uint16_t*>(target);
    for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_float16(in[i]);
  } else {
    auto* out = static_cast<std::uint16_t*>(target);
    for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_bfloat16(in[i]);
  }
}

[[maybe_unused]] void rms_norm(float* row, std::int64_t n, const float* weight, float epsilon) {
  // Eight partial sums: a fixed order that vectorises.
  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int k = 0; k < 8; ++k) sums[k] += row[i + k] * row[i + k];
  }
  for (; i < n; ++i) sums[0] += row[i] * row[i];
  const float total = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  const float factor = 1.f / std::sqrt(total / static_cast<float>(n) + epsilon);
  for (i = 0; i < n; ++i) row[i] = row[i] * factor * weight[i];
}

// Rotates `half` pairs from `row` on by the angles of one position.
[[maybe_unused]] void rotate(float* row, const float* cos, const float* sin, std::int64_t half, bool interleaved) {
  if (interleaved) {
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = row[2 * i], b = row[2 * i + 1];
      row[2 * i] = a * cos[i] - b * sin[i];
      row[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  float* low = row;
  float* high = row + half;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = low[i], b = high[i];
    low[i] = a * cos[i] - b * sin[i];
    high[i] = b * cos[i] + a * sin[i];
  }
}

// Scale of a PER_TOKEN row: max|x| / 127, 0 for a zero row.
[[maybe_unused]] float token_scale(const float* row, std::int64_t n) {
  float top = 0.f;
  for (std::int64_t i = 0; i < n; ++i) {
    const float a = row[i] < 0.f ? -row[i] : row[i];
    top = a > top ? a : top;
  }
  return top / 127.f;
}

// Stores a row as codes. `scales` holds one scale, or one a channel when `per_channel` is 1. A zero scale gives code 0.
[[maybe_unused]] void quantise_row(Type type, const float* row, std::int64_t n, const float* scales,
                                   std::int64_t per_channel, std::uint8_t* out) {
  const auto scaled = [&](std::int64_t i) {
    const float s = scales[i * per_channel];
    return s == 0.f ? 0.f : row[i] / s;
  };
  if (type == Type::kInt8) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<std::uint8_t>(round_clamped(scaled(i), -128.f, 127.f));
  } else if (type == Type::kFloat8) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_float8(scaled(i));
  } else {
    for (std::int64_t i = 0; i < n; i += 2) {
      const int low = round_clamped(scaled(i), -8.f, 7.f) + 8;
      const int high = i + 1 < n ? round_clamped(scaled(i + 1), -8.f, 7.f) + 8 : 8;
      out[i / 2] = static_cast<std::uint8_t>(low | (high << 4));
    }
  }
}

// The code at channel i of a stored row as a number, before any scale.
[[maybe_unused]] float stored_value(Type type, const std::uint8_t* row, std::int64_t i) {
  switch (type) {
    case Type::kFloat32: {
      float x;
      std::memcpy(&x, row + 4 * i, 4);
      return x;
    }
    case Type::kFloat16:
    case Type::kBFloat16: {
      std::uint16_t h;
      std::memcpy(&h, row + 2 * i, 2);
      return type == Type::kFloat16 ? float16_to_float(h) : bfloat16_to_float(h);
    }
    case Type::kInt8:
      return static_cast<float>(static_cast<std::int8_t>(row[i]));
    case Type::kFloat8:
      return float8_to_float(row[i]);
    default:
      return static_cast<float>(((row[i / 2] >> (4 * (i & 1))) & 15) - 8);
  }
}

}  // namespace
}  // namespace pagegraft
