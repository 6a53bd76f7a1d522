// From running sums to results: leaving a partial or writing output rows, and merging partials.
namespace pagegraft {
namespace {

// Packed token and query head of a group's row.
struct RowPlace {
  std::int64_t token, head;
};

inline RowPlace place_of(const Step& step, const Group& group, std::int64_t row) {
  const std::int64_t heads_per_kv = step.sizes.H / step.sizes.G;
  const std::int64_t per_head = group.tokens * heads_per_kv;
  const std::int64_t g = row / per_head, rest = row % per_head;
  return {group.first_token + rest / heads_per_kv, (group.first_head + g) * heads_per_kv + rest % heads_per_kv};
}

// Normalises one row's sums in place, applies the static scale of the value cache, and stores the output row.
void write_row(const Step& step, const RowPlace& place, float max, float total, float* sums) {
  const std::int64_t Dv = step.sizes.Dv;
  SoftmaxState state{max, total};
  const float factor = state.finish(step.sinks.empty() ? nullptr : step.sinks.data() + place.head);
  const Quant quant = step.config.latent ? step.config.k_quant : step.config.v_quant;
  if (quant == Quant::kPerTensor || quant == Quant::kPerChannel) {
    const std::int64_t g = place.head / (step.sizes.H / step.sizes.G);
    const RowScale s = step.config.latent ? row_scale(step.call.in[contract::kKScale], quant, g, step.sizes.D)
                                          : row_scale(step.call.in[contract::kVScale], quant, g, Dv);
    for (std::int64_t i = 0; i < Dv; ++i) sums[i] *= factor * s.scales[i * s.per_channel];
  } else {
    for (std::int64_t i = 0; i < Dv; ++i) sums[i] *= factor;
  }
  auto* out = static_cast<std::uint8_t*>(step.call.output) +
              (place.token * step.sizes.H + place.head) * Dv * element_size(step.config.compute);
  store_row(step.config.compute, sums, Dv, out);
}

// Hands a unit's rows on: into its partial, or to the output when it is the only unit of its group.
void leave_rows(const Step& step, const Group& group, const float* max, const float* total, float* sums,
                std::int64_t stride, float* partial) {
  const std::int64_t rows = rows_of(step, group).all, Dv = step.sizes.Dv;
  if (partial == nullptr) {
    for (std::int64_t r = 0; r < rows; ++r) {
      write_row(step, place_of(step, group, r), max[r], total[r], sums + r * stride);
    }
    return;
  }
  std::memcpy(partial, max, static_cast<std::size_t>(rows) * sizeof(float));
  std::memcpy(partial + rows, total, static_cast<std::size_t>(rows) * sizeof(float));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(partial + 2 * rows + r * Dv, sums + r * stride, static_cast<std::size_t>(Dv) * sizeof(float));
  }
}

void merge_group(const Step& step, const Group& group, const float* partials, Scratch* scratch) {
  const std::int64_t rows = rows_of(step, group).all, Dv = step.sizes.Dv;
  const std::int64_t size = partial_size(step, group);
  float* sums = scratch->reserve(Dv);
  for (std::int64_t r = 0; r < rows; ++r) {
    SoftmaxState state;
    for (std::int64_t i = 0; i < Dv; ++i) sums[i] = 0.f;
    for (std::int64_t k = 0; k < group.ranges; ++k) {
      const float* partial = partials + k * size;
      const float* theirs = partial + 2 * rows + r * Dv;
      float mine_factor, their_factor;
      state.merge({partial[r], partial[rows + r]}, &mine_factor, &their_factor);
      for (std::int64_t i = 0; i < Dv; ++i) sums[i] = sums[i] * mine_factor + theirs[i] * their_factor;
    }
    write_row(step, place_of(step, group, r), state.max, state.sum, sums);
  }
}

}  // namespace
}  // namespace pagegraft
