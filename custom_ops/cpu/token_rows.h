// Steps of a call that work on whole tokens: preparing a query head, and writing a token's new keys and values.
// Internal to the file that includes it, like rows.h.
#pragma once

#include "rows.h"
#include "step.h"

namespace pagegraft {
namespace {

// Loads the rotary angles of one position as float32 into `angles`: rotary_dim/2 cosines, then as many sines.
[[maybe_unused]] void load_angles(const Step& step, std::int64_t position, float* angles) {
  if (!step.config.rotary) return;
  const std::int64_t half = step.sizes.rotary_dim / 2;
  load_row(step.config.compute, step.cos_row(position), half, angles);
  load_row(step.config.compute, step.sin_row(position), half, angles + half);
}

// Loads one query or key head as float32, normalised and rotated.
[[maybe_unused]] void load_head(const Step& step, const void* source, const std::vector<float>& norm,
                                const float* angles, float* row) {
  const Config& c = step.config;
  load_row(c.compute, source, step.sizes.D, row);
  if (!norm.empty()) rms_norm(row, step.sizes.D, norm.data(), c.epsilon);
  if (c.rotary) {
    const std::int64_t half = step.sizes.rotary_dim / 2;
    rotate(row + c.rotary_offset, angles, angles + half, half, c.interleaved);
  }
}

// Scales of one stored row and how they advance with the channel.
struct RowScale {
  const float* scales;
  std::int64_t per_channel;
};

[[maybe_unused]] RowScale row_scale(const Tensor& tensor, Quant quant, std::int64_t head, std::int64_t head_size) {
  const auto* scales = static_cast<const float*>(tensor.data);
  return quant == Quant::kPerChannel ? RowScale{scales + head * head_size, 1} : RowScale{scales, 0};
}

// Stores one head's new vector into its slot, quantised if the cache is.
[[maybe_unused]] void store_head(const Step& step, const KvView& view, bool is_key, std::int64_t slot,
                                 std::int64_t head, const float* row) {
  const Config& c = step.config;
  const std::int64_t n = is_key ? step.sizes.D : step.sizes.Dv;
  const std::int64_t block = slot / step.sizes.B, offset = slot % step.sizes.B;
  auto* target = const_cast<std::uint8_t*>(view.token(block, offset) + head * view.head_stride);
  if (!is_quantised(view.type)) {
    store_row(view.type, row, n, target);
    return;
  }
  const Quant quant = is_key ? c.k_quant : c.v_quant;
  if (quant == Quant::kPerToken) {
    float* scale = (is_key ? step.call.k_scale : step.call.v_scale) +
                   (block * step.sizes.G + head) * step.sizes.B + offset;
    *scale = token_scale(row, n);
    quantise_row(view.type, row, n, scale, 0, target);
    return;
  }
  const RowScale s = row_scale(step.call.in[is_key ? contract::kKScale : contract::kVScale], quant, head, n);
  quantise_row(view.type, row, n, s.scales, s.per_channel, target);
}

// Writes the keys and values of packed token `token`, which is at `position` of `sequence`. `scratch` holds
// max(D, Dv) + rotary_dim floats.
[[maybe_unused]] void write_token(const Step& step, std::int64_t token, std::int64_t sequence, std::int64_t position,
                                  float* scratch) {
  const std::int64_t slot = step.slot_of(token, sequence, position);
  if (slot < 0) return;
  float* angles = scratch;
  float* row = scratch + step.sizes.rotary_dim;
  load_angles(step, position, angles);
  for (std::int64_t g = 0; g < step.sizes.G; ++g) {
    load_head(step, step.key.at(token, g), step.k_norm, angles, row);
    store_head(step, step.kv.key, true, slot, g, row);
    if (step.config.latent) continue;
    load_row(step.config.compute, step.value.at(token, g), step.sizes.Dv, row);
    store_head(step, step.kv.value, false, slot, g, row);
  }
}

}  // namespace
}  // namespace pagegraft
