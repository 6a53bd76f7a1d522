// Few query rows: scores of one KV head's rows against a piece of keys, and the softmax over them.
namespace pagegraft {
namespace {

// Scores of kRows query rows against kKeys = W / kRows keys.
template <Type kType, int kRows>
inline void dot_block(const float* query, std::int64_t q_stride, const std::uint8_t* const* keys, std::int64_t head,
                      std::int64_t D, float* scores, std::int64_t score_stride, Ahead ahead) {
  constexpr int kKeys = Simd::W / kRows;
  constexpr std::int64_t kBytes = kKeys * stored_bytes<kType>(W);
  F sums[Simd::W];
#pragma GCC unroll 16
  for (int i = 0; i < Simd::W; ++i) sums[i] = Simd::zero();
  const std::uint8_t* rows[kKeys];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) rows[k] = keys[k] + head;
  const auto step = [&](std::int64_t d, auto load) __attribute__((always_inline)) {
    F key[kKeys];
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) key[k] = load(rows[k]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F q = Simd::load(query + r * q_stride + d);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) sums[r * kKeys + k] = Simd::fma(q, key[k], sums[r * kKeys + k]);
    }
  };
  std::int64_t d = 0;
  if constexpr (kInFours<kType>) {
    for (; d + 4 * W <= D; d += 4 * W) {
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        ahead.fetch<stored_bytes<kType>(4 * W)>();
        F key[4];
        load_vectors<kType, 4>(rows[k] + stored_bytes<kType>(d), key);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          F& sum = sums[r * kKeys + k];
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) sum = Simd::fma(Simd::load(query + r * q_stride + d + v * W), key[v], sum);
        }
      }
    }
  }
  for (; d + W <= D; d += W) {
    ahead.fetch<kBytes>();
    step(d, [&](const std::uint8_t* row) { return load_stored<kType>(row + stored_bytes<kType>(d)); });
  }
  if (d < D) {
    step(d, [&](const std::uint8_t* row) { return load_tail<kType>(row + stored_bytes<kType>(d), D - d); });
  }
  alignas(64) float lanes[Simd::W];
  Simd::store(lanes, Simd::reduce_each(sums));
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * score_stride, lanes + r * kKeys, kKeys * sizeof(float));
}

template <Type kType, int kRows>
inline void dot_rows(const FewRows& few, std::int64_t r, const float* query, const std::uint8_t* const* keys,
                     std::int64_t head, std::int64_t count, std::int64_t D, Fetcher* fetcher) {
  constexpr int kKeys = Simd::W / kRows;
  const std::int64_t bytes = kKeys * stored_bytes<kType>(D);
  for (std::int64_t j = 0; j < count; j += kKeys) {
    const Ahead ahead = r == 0 ? fetcher->take(bytes) : Ahead{keys[j] + head, keys[j] + head};
    dot_block<kType, kRows>(query + r * few.q_stride, few.q_stride, keys + j, head, D,
                            few.scores + r * few.score_stride + j, few.score_stride, ahead);
  }
}

// Scores of all rows of one KV head against `count` keys, whose pointers are padded to whole vectors.
template <Type kType>
void dot_tile(const FewRows& few, const float* query, const std::uint8_t* const* keys, std::int64_t head,
              std::int64_t count, std::int64_t D, Fetcher* fetcher) {
  std::int64_t r = 0;
  for (; few.rows - r >= 4; r += 4) dot_rows<kType, 4>(few, r, query, keys, head, count, D, fetcher);
  for (; few.rows - r >= 2; r += 2) dot_rows<kType, 2>(few, r, query, keys, head, count, D, fetcher);
  for (; r < few.rows; ++r) dot_rows<kType, 1>(few, r, query, keys, head, count, D, fetcher);
}

// ALiBi, softcap and mask of one row's scores, which are already scaled. Pads to whole vectors with -inf.
inline void shape_scores(const Step& step, const Piece& piece, const RowLimits& limits, std::int64_t head,
                         float* scores) {
  const std::int64_t count = piece.to - piece.from;
  if (!step.config.slopes.empty()) {
    const float slope = step.config.slopes.data()[head];
    const std::int64_t distance = piece.tile->begin + piece.from - limits.position;
    for (std::int64_t j = 0; j < count; ++j) scores[j] += slope * static_cast<float>(distance + j);
  }
  if (step.config.softcap > 0.f) {
    const F cap = Simd::set1(step.config.softcap), inverse = Simd::set1(1.f / step.config.softcap);
    for (std::int64_t j = 0; j < count; j += W) {
      Simd::store(scores + j, Simd::mul(cap, tanh(Simd::mul(Simd::load(scores + j), inverse))));
    }
  }
  if (piece.masked) {
    for (std::int64_t j = 0; j < count; ++j) {
      if (!piece.tile->sees(limits, piece.from + j)) scores[j] = -kInfinity;
    }
  }
  for (std::int64_t j = count; j < padded(count); ++j) scores[j] = -kInfinity;
}

// Replaces the scores of one KV head's rows by their exponentials and moves their states on; leaves the factors of their
// earlier sums. Without a branch on a value, and with totals kept by lane until the end: the rows' chains overlap.
inline void softmax_rows(const FewRows& few, std::int64_t count, std::int64_t i) {
  float* max = few.max + i * few.state_stride;
  float* total = few.total + i * few.rows * W;
  alignas(64) float before[kFewRows + Simd::W], sums[kFewRows * Simd::W];
  for (std::int64_t r = 0; r < few.rows; r += W) Simd::store(before + r, Simd::load(max + r));
  for (std::int64_t r = 0; r < few.rows; ++r) {
    float* scores = few.scores + r * few.score_stride;
    F top = Simd::set1(-kInfinity);
    for (std::int64_t j = 0; j < count; j += W) top = Simd::max(top, Simd::load(scores + j));
    const float tile_max = Simd::reduce_max(top);
    max[r] = before[r] < tile_max ? tile_max : before[r];
    const F base = finite_max(Simd::set1(max[r]));
    F sum = Simd::zero();
    for (std::int64_t j = 0; j < count; j += W) {
      const F p = exp(Simd::sub(Simd::load(scores + j), base));
      Simd::store(scores + j, p);
      sum = Simd::add(sum, p);
    }
    Simd::store(sums + r * W, sum);
  }
  for (std::int64_t r = 0; r < few.rows; r += W) {
    Simd::store(few.factors + r, carry(Simd::load(before + r), Simd::load(max + r)));
  }
  for (std::int64_t r = 0; r < few.rows; ++r) {
    const F earlier = Simd::mul(Simd::load(total + r * W), Simd::set1(few.factors[r]));
    Simd::store(total + r * W, Simd::add(earlier, Simd::load(sums + r * W)));
  }
}

// Per-token scales of one piece for one KV head, side by side, padded to whole vectors with zeros. In blocks of at least
// W tokens a vector of positions crosses at most one end of a block, so equal ends mean that it lies in one stretch.
inline void gather_scales(const float* scales, const std::int64_t* index, std::int64_t block_size, std::int64_t count,
                          float* out) {
  for (std::int64_t j = 0; j < count; j += W) {
    if (block_size >= W && j + W <= count && index[j + W - 1] - index[j] == W - 1) {
      Simd::store(out + j, Simd::load(scales + index[j]));
      continue;
    }
    for (std::int64_t i = j; i < j + W; ++i) out[i] = i < count ? scales[index[i]] : 0.f;
  }
}

inline void multiply(float* row, const float* factors, std::int64_t count) {
  for (std::int64_t j = 0; j < count; j += W) {
    Simd::store(row + j, Simd::mul(Simd::load(row + j), Simd::load(factors + j)));
  }
}

// Multiplies a row by per-token scales. Positions that the row does not see keep their weight of 0: a scale that nobody
// wrote may be NaN.
inline void scale_weights(const Piece& piece, const RowLimits& limits, const float* scales, float* weights) {
  const std::int64_t count = piece.to - piece.from;
  if (!piece.masked) {
    multiply(weights, scales, count);
    return;
  }
  for (std::int64_t j = 0; j < count; ++j) {
    if (piece.tile->sees(limits, piece.from + j)) weights[j] *= scales[j];
  }
}

// Scores of one KV head's rows to weights.
void weights_of(const Step& step, const FewRows& few, const Piece& piece, std::int64_t g, std::int64_t i) {
  const std::int64_t count = piece.to - piece.from, offset = g * step.sizes.B;
  const std::int64_t* index = piece.tile->scale + piece.from;
  alignas(64) float k_scales[kFewTile + W], v_scales[kFewTile + W];
  if (step.kv.k_scale != nullptr) gather_scales(step.kv.k_scale + offset, index, step.sizes.B, count, k_scales);
  if (step.kv.v_scale != nullptr) gather_scales(step.kv.v_scale + offset, index, step.sizes.B, count, v_scales);
  for (std::int64_t r = 0; r < few.rows; ++r) {
    float* scores = few.scores + r * few.score_stride;
    if (step.kv.k_scale != nullptr) multiply(scores, k_scales, count);
    shape_scores(step, piece, few.limits[r], g * few.heads_per_kv + r % few.heads_per_kv, scores);
  }
  softmax_rows(few, count, i);
  if (step.kv.v_scale == nullptr) return;
  for (std::int64_t r = 0; r < few.rows; ++r) {
    scale_weights(piece, few.limits[r], v_scales, few.scores + r * few.score_stride);
  }
}

}  // namespace
}  // namespace pagegraft
