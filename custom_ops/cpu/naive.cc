// The first kernel, kept as the oracle for the others (PAGEGRAFT_ISA=naive): one query row at a time, two passes over
// its visible keys, sums in double, every stored element dequantised on its own. Lesson: right, and 50 times too slow.
#include "naive.h"

#include <cmath>

#include "online_softmax.h"
#include "token_rows.h"

namespace pagegraft {
namespace {

// One visible key: its rows in the caches and its scales.
struct Place {
  const std::uint8_t* key;
  const std::uint8_t* value;
  RowScale key_scale;
  RowScale value_scale;
};

constexpr float kOne = 1.f;

RowScale scale_of(const Step& step, bool is_key, std::int64_t block, std::int64_t offset, std::int64_t head) {
  const Config& c = step.config;
  const bool from_key = is_key || c.latent;
  const Quant quant = from_key ? c.k_quant : c.v_quant;
  if (quant == Quant::kNone) return {&kOne, 0};
  if (quant == Quant::kPerToken) {
    const float* scales = from_key ? step.call.k_scale : step.call.v_scale;
    return {scales + (block * step.sizes.G + head) * step.sizes.B + offset, 0};
  }
  return row_scale(step.call.in[from_key ? contract::kKScale : contract::kVScale], quant, head,
                   from_key ? step.sizes.D : step.sizes.Dv);
}

bool find(const Step& step, std::int64_t sequence, std::int64_t position, std::int64_t head, Place* place) {
  const std::int64_t block = step.block_of(sequence, position);
  if (block < 0) return false;
  const std::int64_t offset = position % step.sizes.B;
  place->key = step.kv.key.token(block, offset) + head * step.kv.key.head_stride;
  place->value = step.kv.value.token(block, offset) + head * step.kv.value.head_stride;
  place->key_scale = scale_of(step, true, block, offset, head);
  place->value_scale = scale_of(step, false, block, offset, head);
  return true;
}

float score(const Step& step, const float* query, const Place& place, std::int64_t head, std::int64_t distance) {
  double sum = 0;
  for (std::int64_t i = 0; i < step.sizes.D; ++i) {
    const float k = stored_value(step.kv.key.type, place.key, i) * place.key_scale.scales[i * place.key_scale.per_channel];
    sum += double{query[i]} * k;
  }
  double s = sum * step.scale;
  if (!step.config.slopes.empty()) {
    s += double{step.config.slopes[static_cast<std::size_t>(head)]} * static_cast<double>(distance);
  }
  if (step.config.softcap > 0.f) s = step.config.softcap * std::tanh(s / step.config.softcap);
  return static_cast<float>(s);
}

void attend_row(const Step& step, std::int64_t sequence, std::int64_t token, std::int64_t head, NaiveScratch* scratch) {
  const Sizes& z = step.sizes;
  const std::int64_t position = step.past[sequence] + token - step.cumulative[sequence];
  const std::int64_t g = head / (z.H / z.G);
  const VisibleRange range = visible_range(step.config, position, step.total_tokens(sequence));
  load_angles(step, position, scratch->angles.data());
  load_head(step, step.query.at(token, head), step.q_norm, scratch->angles.data(), scratch->query.data());
  scratch->scores.assign(static_cast<std::size_t>(range.end - range.begin), 0.f);
  std::fill(scratch->sums.begin(), scratch->sums.end(), 0.0);
  Place place;
  float top = step.sinks.empty() ? -INFINITY : step.sinks[static_cast<std::size_t>(head)];
  for (std::int64_t j = range.begin; j < range.end; ++j) {
    if (!find(step, sequence, j, g, &place)) continue;
    const float s = score(step, scratch->query.data(), place, head, j - position);
    scratch->scores[static_cast<std::size_t>(j - range.begin)] = s;
    if (!(s <= top)) top = s;
  }
  double total = step.sinks.empty() ? 0.0 : std::exp(double{step.sinks[static_cast<std::size_t>(head)]} - top);
  for (std::int64_t j = range.begin; j < range.end; ++j) {
    if (!find(step, sequence, j, g, &place)) continue;
    const double p = std::exp(double{scratch->scores[static_cast<std::size_t>(j - range.begin)]} - top);
    total += p;
    for (std::int64_t i = 0; i < z.Dv; ++i) {
      const float v =
          stored_value(step.kv.value.type, place.value, i) * place.value_scale.scales[i * place.value_scale.per_channel];
      scratch->sums[static_cast<std::size_t>(i)] += p * v;
    }
  }
  for (std::int64_t i = 0; i < z.Dv; ++i) {
    const double sum = scratch->sums[static_cast<std::size_t>(i)];
    scratch->row[static_cast<std::size_t>(i)] = total == 0.0 ? 0.f : static_cast<float>(sum / total);
  }
  auto* out = static_cast<std::uint8_t*>(step.call.output) + (token * z.H + head) * z.Dv * element_size(step.config.compute);
  store_row(step.config.compute, scratch->row.data(), z.Dv, out);
}

}  // namespace

NaiveScratch::NaiveScratch(const Sizes& sizes)
    : angles(static_cast<std::size_t>(sizes.rotary_dim)),
      query(static_cast<std::size_t>(sizes.D)),
      row(static_cast<std::size_t>(sizes.Dv)),
      sums(static_cast<std::size_t>(sizes.Dv)) {}

void naive_write(const Step& step, std::int64_t sequence) {
  std::vector<float> scratch(static_cast<std::size_t>(std::max(step.sizes.D, step.sizes.Dv) + step.sizes.rotary_dim));
  for (std::int64_t t = step.cumulative[sequence]; t < step.cumulative[sequence + 1]; ++t) {
    write_token(step, t, sequence, step.past[sequence] + t - step.cumulative[sequence], scratch.data());
  }
}

void naive_attend(const Step& step, std::int64_t sequence, std::int64_t token, std::int64_t head,
                  NaiveScratch* scratch) {
  attend_row(step, sequence, token, head, scratch);
}

}  // namespace pagegraft
