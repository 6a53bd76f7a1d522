// Few query rows: weighted sums of the values of a piece.
namespace pagegraft {
namespace {

// sums[r] = factors[r] * sums[r] + weights[r] . values, for kRows rows and kVectors vectors of channels. `offset` is that
// of the first channel within a stored row.
template <Type kType, int kRows, int kVectors>
inline void weigh_block(const FewRows& few, const float* weights, const float* factors,
                        const std::uint8_t* const* values, std::int64_t offset, std::int64_t count, float* sums,
                        Ahead ahead) {
  constexpr std::int64_t kBytes = stored_bytes<kType>(kVectors * W);
  F acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = Simd::mul(Simd::set1(factors[r]), Simd::load(sums + r * few.v_stride + v * W));
    }
  }
  for (std::int64_t j = 0; j < count; ++j) {
    ahead.fetch<kBytes>();
    F value[kVectors];
    load_vectors<kType, kVectors>(values[j] + offset, value);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F p = Simd::set1(weights[r * few.score_stride + j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::fma(p, value[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::store(sums + r * few.v_stride + v * W, acc[r][v]);
  }
}

template <Type kType, int kRows>
inline void weigh_rows(const FewRows& few, std::int64_t r, const std::uint8_t* const* values, std::int64_t head,
                       std::int64_t count, std::int64_t Dv, float* sums, Fetcher* fetcher) {
  const float* weights = few.scores + r * few.score_stride;
  const float* factors = few.factors + r;
  float* target = sums + r * few.v_stride;
  constexpr int kVectors = Simd::kFewVectors;
  const auto ahead = [&](std::int64_t channels) {
    return r == 0 ? fetcher->take(count * stored_bytes<kType>(channels)) : Ahead{values[0] + head, values[0] + head};
  };
  std::int64_t c = 0;
  for (; c + kVectors * W <= Dv; c += kVectors * W) {
    weigh_block<kType, kRows, kVectors>(few, weights, factors, values, head + stored_bytes<kType>(c), count, target + c,
                                        ahead(kVectors * W));
  }
  for (; c + W <= Dv; c += W) {
    weigh_block<kType, kRows, 1>(few, weights, factors, values, head + stored_bytes<kType>(c), count, target + c,
                                 ahead(W));
  }
  if (c == Dv) return;
  for (int i = 0; i < kRows; ++i) {
    F acc = Simd::mul(Simd::set1(factors[i]), Simd::load(target + i * few.v_stride + c));
    for (std::int64_t j = 0; j < count; ++j) {
      const F value = load_tail<kType>(values[j] + head + stored_bytes<kType>(c), Dv - c);
      acc = Simd::fma(Simd::set1(weights[i * few.score_stride + j]), value, acc);
    }
    Simd::store(target + i * few.v_stride + c, acc);
  }
}

template <Type kType>
void weigh_tile(const FewRows& few, const std::uint8_t* const* values, std::int64_t head, std::int64_t count,
                std::int64_t Dv, float* sums, Fetcher* fetcher) {
  std::int64_t r = 0;
  for (; few.rows - r >= 4; r += 4) weigh_rows<kType, 4>(few, r, values, head, count, Dv, sums, fetcher);
  for (; few.rows - r >= 2; r += 2) weigh_rows<kType, 2>(few, r, values, head, count, Dv, sums, fetcher);
  for (; r < few.rows; ++r) weigh_rows<kType, 1>(few, r, values, head, count, Dv, sums, fetcher);
}

template <Type kType>
bool rows_finite(const std::uint8_t* const* rows, std::int64_t head, std::int64_t count, std::int64_t n) {
  F sum = Simd::zero();
  for (std::int64_t j = 0; j < count; ++j) {
    const std::uint8_t* row = rows[j] + head;
    std::int64_t i = 0;
    for (; i + W <= n; i += W) sum = Simd::fma(load_stored<kType>(row + stored_bytes<kType>(i)), Simd::zero(), sum);
    if (i < n) sum = Simd::fma(load_tail<kType>(row + stored_bytes<kType>(i), n - i), Simd::zero(), sum);
  }
  return Simd::reduce_add(sum) == 0.f;
}

// As weigh_tile for a tile in which some row must not see a value that is NaN or infinite: not even times zero.
void weigh_strictly(const Step& step, const FewRows& few, const Piece& piece, std::int64_t g, float* sums) {
  for (std::int64_t r = 0; r < few.rows; ++r) {
    float* target = sums + r * few.v_stride;
    for (std::int64_t i = 0; i < step.sizes.Dv; ++i) target[i] *= few.factors[r];
    for (std::int64_t j = piece.from; j < piece.to; ++j) {
      if (!piece.tile->sees(few.limits[r], j)) continue;
      const float p = few.scores[r * few.score_stride + j - piece.from];
      const std::uint8_t* row = piece.tile->value[j] + g * step.kv.value.head_stride;
      for (std::int64_t i = 0; i < step.sizes.Dv; ++i) {
        target[i] += p * stored_value(step.kv.value.type, row, element_at(step, i, step.sizes.Dv));
      }
    }
  }
}

}  // namespace
}  // namespace pagegraft
