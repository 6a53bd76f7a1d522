// Few query rows: weighted sums of the values of a piece.
namespace pagegraft {
namespace {

// sums += weights . values for kShare rows of one KV head from row `r` on and kWeighKeys positions from `j` on.
template <Type kType, int kShare>
inline void weigh_block(const FewRows& few, std::int64_t r, std::int64_t j, const std::uint8_t* const* values,
                        const Ahead<Simd::kWeighKeys>& ahead, std::int64_t Dv) {
  constexpr int kKeys = Simd::kWeighKeys;
  const float* weights = few.scores + r * FewRows::kScoreStride + j;
  float* sums = few.sums + r * few.v_stride;
  const std::uint8_t *rows[kKeys], *near[kKeys], *far[kKeys];
#pragma GCC unroll 4
  for (int k = 0; k < kKeys; ++k) {
    rows[k] = values[k] + few.value_head[r];
    near[k] = ahead.near(k, few.value_head[r] + kNear);
    far[k] = ahead.far(k, few.value_head[r]);
  }
  const auto fetch = [&](std::int64_t c) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) {
      __builtin_prefetch(far[k] + stored_bytes<kType>(c), 0, 2);
      __builtin_prefetch(near[k] + stored_bytes<kType>(c));
    }
  };
  std::int64_t c = 0;
  if constexpr (kInFours<kType>) {
    for (; c + 4 * W <= Dv; c += 4 * W) {
      fetch(c);
      F acc[kShare][4];
#pragma GCC unroll 16
      for (int i = 0; i < kShare * 4; ++i) acc[i / 4][i % 4] = Simd::load(sums + i / 4 * few.v_stride + c + i % 4 * W);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) {
        F value[4];
        load_four(rows[k] + stored_bytes<kType>(c), value);
#pragma GCC unroll 4
        for (int s = 0; s < kShare; ++s) {
          const F p = Simd::set1(weights[s * FewRows::kScoreStride + k]);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) acc[s][v] = Simd::fma(p, value[v], acc[s][v]);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kShare * 4; ++i) Simd::store(sums + i / 4 * few.v_stride + c + i % 4 * W, acc[i / 4][i % 4]);
    }
    if (c == Dv) return;
  }
  F p[kShare][kKeys];
#pragma GCC unroll 16
  for (int i = 0; i < kShare * kKeys; ++i) {
    p[i / kKeys][i % kKeys] = Simd::set1(weights[i / kKeys * FewRows::kScoreStride + i % kKeys]);
  }
  const auto step = [&](std::int64_t at, auto load) __attribute__((always_inline)) {
    F value[kKeys];
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) value[k] = load(rows[k] + stored_bytes<kType>(at));
#pragma GCC unroll 4
    for (int s = 0; s < kShare; ++s) {
      float* sum = sums + s * few.v_stride + at;
      F acc = Simd::load(sum);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) acc = Simd::fma(p[s][k], value[k], acc);
      Simd::store(sum, acc);
    }
  };
  for (; c + kLine<kType> <= Dv; c += kLine<kType>) {
    fetch(c);
#pragma GCC unroll 4
    for (std::int64_t i = c; i < c + kLine<kType>; i += W) step(i, load_stored<kType>);
  }
  for (; c + W <= Dv; c += W) step(c, load_stored<kType>);
  if (c < Dv) step(c, [&](const std::uint8_t* row) { return load_tail<kType>(row, Dv - c); });
}

// Multiplies the sums so far by the factors that the piece in hand left.
inline void carry_sums(const FewRows& few) {
  for (std::int64_t r = 0; r < few.all; ++r) {
    if (few.factors[r] == 1.f) continue;
    const F factor = Simd::set1(few.factors[r]);
    float* sums = few.sums + r * few.v_stride;
    for (std::int64_t c = 0; c < few.v_stride; c += W) Simd::store(sums + c, Simd::mul(factor, Simd::load(sums + c)));
  }
}

template <Type kType>
void weigh_tile(const Step& step, const FewRows& few, const Piece& piece) {
  constexpr int kKeys = Simd::kWeighKeys;
  const std::uint8_t* const* values = piece.tile->value + piece.from;
  const std::int64_t count = piece.to - piece.from;
  Ahead<kKeys> ahead(values, count, piece.tile->key + piece.to, step.kv.value.token_stride);
  for (std::int64_t j = 0; j < count; j += kKeys) {
    // Beyond the piece weights are zero, but a value may be anything: the last one is finite, see few_piece.
    const std::uint8_t* rows[kKeys];
    for (int k = 0; k < kKeys; ++k) rows[k] = values[j + k < count ? j + k : count - 1];
    ahead.move(j);
    for (std::int64_t head = 0; head < few.all; head += few.rows) {
      each_chunk(few.rows, [&](std::int64_t r, auto share) {
        weigh_block<kType, share.value>(few, head + r, j, rows, ahead, step.sizes.Dv);
      });
    }
  }
}

// Whether every value of these rows of one KV head is finite.
template <Type kType>
bool rows_finite(const std::uint8_t* const* rows, std::int64_t from, std::int64_t count, std::int64_t n) {
  F sum = Simd::zero();
  for (std::int64_t j = 0; j < count; ++j) {
    const std::uint8_t* row = rows[j] + from;
    std::int64_t i = 0;
    for (; i + W <= n; i += W) sum = Simd::fma(load_stored<kType>(row + stored_bytes<kType>(i)), Simd::zero(), sum);
    if (i < n) sum = Simd::fma(load_tail<kType>(row + stored_bytes<kType>(i), n - i), Simd::zero(), sum);
  }
  return Simd::reduce_add(sum) == 0.f;
}

// As weigh_tile where a value that would be multiplied by zero is NaN or infinite: a row takes only what it sees.
// `element(i)` is the element of a stored row that index i of the sums is for.
template <class Element>
void weigh_strictly(const Step& step, const FewRows& few, const Piece& piece, Element element) {
  for (std::int64_t r = 0; r < few.all; ++r) {
    float* sums = few.sums + r * few.v_stride;
    for (std::int64_t j = piece.from; j < piece.to; ++j) {
      if (!piece.tile->sees(few.limits[r % few.rows], j)) continue;
      const float p = few.scores[r * FewRows::kScoreStride + j - piece.from];
      const std::uint8_t* row = piece.tile->value[j] + few.value_head[r];
      for (std::int64_t i = 0; i < few.v_stride; ++i) {
        const std::int64_t e = element(i);
        if (e < step.sizes.Dv) sums[i] += p * stored_value(step.kv.value.type, row, e);
      }
    }
  }
}

}  // namespace
}  // namespace pagegraft
