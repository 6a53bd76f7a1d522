// Few query rows: their scores against a piece of keys, and the softmax over them.
namespace pagegraft {
namespace {

// Scores of kRows query rows from row `r` on, kShare of them to a KV head, against kDotKeys keys.
template <Type kType, int kRows, int kShare>
inline void dot_block(const FewRows& few, std::int64_t r, const std::uint8_t* const* keys, const Ahead<kDotKeys>& ahead,
                      std::int64_t D, float* scores) {
  constexpr int kHeads = kRows / kShare;
  const float* query = few.query + r * few.q_stride;
  F sums[Simd::W];
#pragma GCC unroll 16
  for (int i = 0; i < Simd::W; ++i) sums[i] = Simd::zero();
  const KeyRows<kHeads, kShare> rows(few, r, keys, ahead);
  const auto fetch = [&](std::int64_t d) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) rows.fetch(h, stored_bytes<kType>(d));
  };
  const auto step = [&](std::int64_t d, auto load) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      F key[kDotKeys];
#pragma GCC unroll 4
      for (int k = 0; k < kDotKeys; ++k) key[k] = load(rows.now[h][k]);
#pragma GCC unroll 4
      for (int s = h * kShare; s < (h + 1) * kShare; ++s) {
        const F q = Simd::load(query + s * few.q_stride + d);
#pragma GCC unroll 4
        for (int k = 0; k < kDotKeys; ++k) sums[s * kDotKeys + k] = Simd::fma(q, key[k], sums[s * kDotKeys + k]);
      }
    }
  };
  std::int64_t d = 0;
  if constexpr (kInFours<kType>) {
    for (; d + 4 * W <= D; d += 4 * W) {
      fetch(d);
#pragma GCC unroll 16
      for (int i = 0; i < kHeads * kDotKeys; ++i) {
        const int h = i / kDotKeys, k = i % kDotKeys;
        F key[4];
        load_four(rows.now[h][k] + stored_bytes<kType>(d), key);
#pragma GCC unroll 4
        for (int s = h * kShare; s < (h + 1) * kShare; ++s) {
          F& sum = sums[s * kDotKeys + k];
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) sum = Simd::fma(Simd::load(query + s * few.q_stride + d + v * W), key[v], sum);
        }
      }
    }
  }
  for (; d + kLine<kType> <= D; d += kLine<kType>) {
    fetch(d);
#pragma GCC unroll 4
    for (std::int64_t i = d; i < d + kLine<kType>; i += W) {
      step(i, [&](const std::uint8_t* row) { return load_stored<kType>(row + stored_bytes<kType>(i)); });
    }
  }
  for (; d + W <= D; d += W) {
    step(d, [&](const std::uint8_t* row) { return load_stored<kType>(row + stored_bytes<kType>(d)); });
  }
  if (d < D) {
    step(d, [&](const std::uint8_t* row) { return load_tail<kType>(row + stored_bytes<kType>(d), D - d); });
  }
  store_scores<kRows>(Simd::reduce_each(sums), scores);
}

// Scores of all rows against the keys of a piece, which kDotKeys tokens at a time are given to
// body(first token, where their keys lie, what to fetch).
template <class Body>
inline void dot_tokens(const Step& step, const Piece& piece, Body body) {
  const std::uint8_t* const* keys = piece.tile->key + piece.from;
  const std::int64_t count = piece.to - piece.from;
  Ahead<kDotKeys> ahead(keys, count, piece.tile->value + piece.from, step.kv.key.token_stride);
  for (std::int64_t j = 0; j < count; j += kDotKeys) {
    ahead.move(j);
    body(j, keys + j, ahead);
  }
}

template <Type kType>
void dot_tile(const Step& step, const FewRows& few, const Piece& piece) {
  dot_tokens(step, piece, [&](std::int64_t j, const std::uint8_t* const* keys, const auto& ahead) {
    each_block(few, [&](std::int64_t r, auto rows, auto share) {
      dot_block<kType, rows.value, share.value>(few, r, keys, ahead, step.sizes.D,
                                                few.scores + r * FewRows::kScoreStride + j);
    });
  });
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

// Replaces the scores of up to W rows from row `first` on by their exponentials and moves their states on; leaves the
// factors of their earlier sums. Without a branch on a value, and with totals kept by lane until the end: the rows' chains
// overlap.
inline void softmax_rows(const FewRows& few, std::int64_t first, std::int64_t count, Lines* values) {
  const std::int64_t rows = few.all - first < W ? few.all - first : W;
  alignas(64) float tops[Simd::W];
  Simd::store(tops, Simd::set1(-kInfinity));
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* scores = few.scores + (first + r) * FewRows::kScoreStride;
    F top = Simd::load(scores);
    for (std::int64_t j = W; j < count; j += W) top = Simd::max(top, Simd::load(scores + j));
    tops[r] = Simd::reduce_max(top);
  }
  const F before = Simd::load(few.max + first), top = Simd::load(tops);
  const F max = Simd::select_less(before, top, top, before);
  Simd::store(few.max + first, max);
  Simd::store(few.factors + first, carry(before, max));
  Simd::store(tops, finite_max(max));
  for (std::int64_t r = 0; r < rows; ++r) {
    float* scores = few.scores + (first + r) * FewRows::kScoreStride;
    float* total = few.total + (first + r) * W;
    const F base = Simd::set1(tops[r]);
    F sum = Simd::mul(Simd::load(total), Simd::set1(few.factors[first + r]));
    for (std::int64_t j = 0; j < count; j += W) {
      values->fetch();
      const F p = exp(Simd::sub(Simd::load(scores + j), base));
      Simd::store(scores + j, p);
      sum = Simd::add(sum, p);
    }
    Simd::store(total, sum);
  }
}

// Per-token scales of one piece for one KV head, as its tokens are listed, padded to whole vectors with zeros. In blocks of
// at least W tokens, those from one multiple of W to the next are listed together, in order or as page_order has them.
template <class S = Simd>
inline void gather_scales(const Step& step, const Piece& piece, const float* scales, float* out) {
  const std::int64_t* index = piece.tile->scale + piece.from;
  const std::int64_t count = piece.to - piece.from;
  for (std::int64_t j = 0; j < count; j += W) {
    if (step.sizes.B >= W && j + W <= count && index[j] % W == 0) {
      F stretch = S::load(scales + index[j]);
      if constexpr (S::W > kDotRows) {  // otherwise all groups are in order, see page_order
        if (index[j + 1] - index[j] != 1) stretch = S::permute(stretch, piece.tile->order.lane);
      }
      S::store(out + j, stretch);
      continue;
    }
    for (std::int64_t i = j; i < j + W; ++i) out[i] = i < count ? scales[index[i]] : 0.f;
  }
}

// Fetches the per-token scales of a piece, of all KV heads of the group. (gcc removes calls of functions that only fetch.)
inline __attribute__((always_inline)) void fetch_scales(const Step& step, const Group& group, const Piece& piece) {
  const std::int64_t B = step.sizes.B, heads = group.heads * B, first = group.first_head * B;
  for (const float* scales : {step.kv.k_scale, step.kv.v_scale}) {
    if (scales == nullptr) continue;
    for (std::int64_t j = piece.from; j < piece.to; j += B) {
      const float* block = scales + piece.tile->scale[j] / B * B + first;
      for (std::int64_t i = 0; i < heads; i += 16) __builtin_prefetch(block + i);
    }
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

// Scores of all rows to weights.
void weights_of(const Step& step, const Group& group, const FewRows& few, const Piece& piece) {
  const std::int64_t count = piece.to - piece.from;
  alignas(64) float scales[kFewTile + W];
  const auto each_row = [&](std::int64_t i, auto body) {
    for (std::int64_t r = 0; r < few.rows; ++r) body(r, few.scores + (i * few.rows + r) * FewRows::kScoreStride);
  };
  for (std::int64_t i = 0; i < group.heads; ++i) {
    const std::int64_t g = group.first_head + i;
    if (step.kv.k_scale != nullptr) {
      gather_scales(step, piece, step.kv.k_scale + g * step.sizes.B, scales);
      each_row(i, [&](std::int64_t, float* scores) { multiply(scores, scales, count); });
    }
    each_row(i, [&](std::int64_t r, float* scores) {
      shape_scores(step, piece, few.limits[r], g * few.heads_per_kv + r % few.heads_per_kv, scores);
    });
  }
  Lines values(piece.tile->value + piece.from, count, step.kv.value.token_stride);
  for (std::int64_t r = 0; r < few.all; r += W) softmax_rows(few, r, count, &values);
  if (step.kv.v_scale == nullptr) return;
  for (std::int64_t i = 0; i < group.heads; ++i) {
    gather_scales(step, piece, step.kv.v_scale + (group.first_head + i) * step.sizes.B, scales);
    each_row(i, [&](std::int64_t r, float* scores) { scale_weights(piece, few.limits[r], scales, scores); });
  }
}

}  // namespace
}  // namespace pagegraft
