// Attention of few query rows, as in decoding: the caches are read once, in the order of memory, all heads of a tile of
// tokens together; all query heads of a KV head share each load of a key or value vector.
namespace pagegraft {
namespace {

// Keys of one tile: about 128 KiB of key cache, so that a tile of keys, one of values and the ones being prefetched
// stay in the second-level cache.
inline std::int64_t few_tile(const Step& step) {
  std::int64_t keys = kMaxTile;
  while (keys > 16 && keys * step.kv.key.token_stride > 128 * 1024) keys /= 2;
  return keys;
}

struct FewRows {
  std::int64_t rows;      // per KV head
  std::int64_t all;       // rows * KV heads
  std::int64_t q_stride;  // floats
  std::int64_t v_stride;
  std::int64_t score_stride;
  float* query;    // [all][q_stride]
  float* sums;     // [all][v_stride]
  float* max;      // [all]
  float* total;    // [all]
  float* scores;   // [rows][score_stride]
  float* factors;  // [rows]
  RowLimits* limits;  // [rows]
  std::int64_t heads_per_kv;
};

inline void prefetch_row(const std::uint8_t* row, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// Scores of kRows query rows against kKeys = W / kRows keys.
template <Type kType, int kRows>
inline void dot_block(const float* query, std::int64_t q_stride, const std::uint8_t* const* keys, std::int64_t D,
                      float* scores, std::int64_t score_stride) {
  constexpr int kKeys = Simd::W / kRows;
  F sums[Simd::W];
#pragma GCC unroll 16
  for (int i = 0; i < Simd::W; ++i) sums[i] = Simd::zero();
  const auto step = [&](std::int64_t d, auto load) __attribute__((always_inline)) {
    F key[kKeys];
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) key[k] = load(keys[k]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F q = Simd::load(query + r * q_stride + d);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) sums[r * kKeys + k] = Simd::fma(q, key[k], sums[r * kKeys + k]);
    }
  };
  std::int64_t d = 0;
  for (; d + W <= D; d += W) {
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
inline void dot_rows(const FewRows& few, const float* query, const std::uint8_t* const* keys, std::int64_t count,
                     std::int64_t D, float* scores) {
  constexpr int kKeys = Simd::W / kRows;
  for (std::int64_t j = 0; j < count; j += kKeys) {
    dot_block<kType, kRows>(query, few.q_stride, keys + j, D, scores + j, few.score_stride);
  }
}

// Scores of all rows of one KV head against the tile. `keys` is padded to a multiple of W with valid rows.
template <Type kType>
void dot_tile(const FewRows& few, const float* query, const std::uint8_t* const* keys, std::int64_t count,
              std::int64_t D) {
  std::int64_t r = 0;
  for (; few.rows - r >= 4 && Simd::W >= 4; r += 4) {
    dot_rows<kType, Simd::W >= 4 ? 4 : 1>(few, query + r * few.q_stride, keys, count, D, few.scores + r * few.score_stride);
  }
  for (; few.rows - r >= 2; r += 2) {
    dot_rows<kType, 2>(few, query + r * few.q_stride, keys, count, D, few.scores + r * few.score_stride);
  }
  for (; r < few.rows; ++r) {
    dot_rows<kType, 1>(few, query + r * few.q_stride, keys, count, D, few.scores + r * few.score_stride);
  }
}

// ALiBi, softcap and mask of one row's scores, which are already scaled. Pads to whole vectors with -inf.
inline void shape_scores(const Step& step, const Tile& tile, const RowLimits& limits, std::int64_t head, bool masked,
                         float* scores) {
  if (!step.config.slopes.empty()) {
    const float slope = step.config.slopes.data()[head];
    for (std::int64_t j = 0; j < tile.count; ++j) {
      scores[j] += slope * static_cast<float>(tile.begin + j - limits.position);
    }
  }
  if (step.config.softcap > 0.f) {
    const F cap = Simd::set1(step.config.softcap), inverse = Simd::set1(1.f / step.config.softcap);
    for (std::int64_t j = 0; j < tile.count; j += W) {
      Simd::store(scores + j, Simd::mul(cap, tanh(Simd::mul(Simd::load(scores + j), inverse))));
    }
  }
  if (masked) {
    for (std::int64_t j = 0; j < tile.count; ++j) {
      if (!tile.sees(limits, j)) scores[j] = -kInfinity;
    }
  }
  for (std::int64_t j = tile.count; j < padded(tile.count); ++j) scores[j] = -kInfinity;
}

// Replaces one row's scores by their exponentials and moves its state on. Returns the factor of its earlier sums.
inline float softmax_row(float* scores, std::int64_t count, float* max, float* total) {
  F top = Simd::set1(-kInfinity);
  for (std::int64_t j = 0; j < count; j += W) top = Simd::max(top, Simd::load(scores + j));
  const float tile_max = Simd::reduce_max(top);
  const float next = *max < tile_max ? tile_max : *max;
  const float factor = *max == -kInfinity ? 0.f : next == *max ? 1.f : exp_scalar(*max - next);
  const F base = Simd::set1(next == -kInfinity ? 0.f : next);
  F sum = Simd::zero();
  for (std::int64_t j = 0; j < count; j += W) {
    const F p = exp(Simd::sub(Simd::load(scores + j), base));
    Simd::store(scores + j, p);
    sum = Simd::add(sum, p);
  }
  *total = *total * factor + Simd::reduce_add(sum);
  *max = next;
  return factor;
}

// sums[r] = factors[r] * sums[r] + weights[r] . values, for kRows rows and kVectors vectors of channels from `c` on.
template <Type kType, int kRows, int kVectors>
inline void weigh_block(const FewRows& few, const float* weights, const float* factors,
                        const std::uint8_t* const* values, std::int64_t count, float* sums, std::int64_t c) {
  F acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = Simd::mul(Simd::set1(factors[r]), Simd::load(sums + r * few.v_stride + c + v * W));
    }
  }
  for (std::int64_t j = 0; j < count; ++j) {
    F value[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) value[v] = load_stored<kType>(values[j] + stored_bytes<kType>(c + v * W));
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
    for (int v = 0; v < kVectors; ++v) Simd::store(sums + r * few.v_stride + c + v * W, acc[r][v]);
  }
}

template <Type kType, int kRows>
inline void weigh_rows(const FewRows& few, std::int64_t r, const std::uint8_t* const* values, std::int64_t count,
                       std::int64_t Dv, float* sums) {
  const float* weights = few.scores + r * few.score_stride;
  const float* factors = few.factors + r;
  float* target = sums + r * few.v_stride;
  constexpr int kVectors = Simd::kFewVectors;
  std::int64_t c = 0;
  for (; c + kVectors * W <= Dv; c += kVectors * W) {
    weigh_block<kType, kRows, kVectors>(few, weights, factors, values, count, target, c);
  }
  for (; c + W <= Dv; c += W) weigh_block<kType, kRows, 1>(few, weights, factors, values, count, target, c);
  if (c == Dv) return;
  for (int i = 0; i < kRows; ++i) {
    F acc = Simd::mul(Simd::set1(factors[i]), Simd::load(target + i * few.v_stride + c));
    for (std::int64_t j = 0; j < count; ++j) {
      const F value = load_tail<kType>(values[j] + stored_bytes<kType>(c), Dv - c);
      acc = Simd::fma(Simd::set1(weights[i * few.score_stride + j]), value, acc);
    }
    Simd::store(target + i * few.v_stride + c, acc);
  }
}

template <Type kType>
void weigh_tile(const FewRows& few, const std::uint8_t* const* values, std::int64_t count, std::int64_t Dv,
                float* sums) {
  std::int64_t r = 0;
  for (; few.rows - r >= 4; r += 4) weigh_rows<kType, 4>(few, r, values, count, Dv, sums);
  for (; few.rows - r >= 2; r += 2) weigh_rows<kType, 2>(few, r, values, count, Dv, sums);
  for (; r < few.rows; ++r) weigh_rows<kType, 1>(few, r, values, count, Dv, sums);
}

template <Type kType>
bool rows_finite(const std::uint8_t* const* rows, std::int64_t count, std::int64_t n) {
  F sum = Simd::zero();
  for (std::int64_t j = 0; j < count; ++j) {
    std::int64_t i = 0;
    for (; i + W <= n; i += W) {
      sum = Simd::fma(load_stored<kType>(rows[j] + stored_bytes<kType>(i)), Simd::zero(), sum);
    }
    if (i < n) sum = Simd::fma(load_tail<kType>(rows[j] + stored_bytes<kType>(i), n - i), Simd::zero(), sum);
  }
  return Simd::reduce_add(sum) == 0.f;
}

// As weigh_tile for a tile in which some row must not see a value that is NaN or infinite: not even times zero.
void weigh_strictly(const Step& step, const FewRows& few, const Tile& tile, std::int64_t g, float* sums) {
  for (std::int64_t r = 0; r < few.rows; ++r) {
    float* target = sums + r * few.v_stride;
    for (std::int64_t i = 0; i < step.sizes.Dv; ++i) target[i] *= few.factors[r];
    for (std::int64_t j = 0; j < tile.count; ++j) {
      if (!tile.sees(few.limits[r], j)) continue;
      const float p = few.scores[r * few.score_stride + j];
      const std::uint8_t* row = tile.value[j] + g * step.kv.value.head_stride;
      for (std::int64_t i = 0; i < step.sizes.Dv; ++i) target[i] += p * stored_value(step.kv.value.type, row, i);
    }
  }
}

FewRows prepare_few(const Step& step, const Group& group, std::int64_t tile, Scratch* scratch) {
  FewRows few;
  few.heads_per_kv = step.sizes.H / step.sizes.G;
  few.rows = group.tokens * few.heads_per_kv;
  few.all = few.rows * group.heads;
  few.q_stride = padded(step.sizes.D);
  few.v_stride = padded(step.sizes.Dv);
  few.score_stride = tile + W;
  const std::int64_t limits = few.rows * static_cast<std::int64_t>(sizeof(RowLimits) / sizeof(float));
  float* p = scratch->reserve(few.all * (few.q_stride + few.v_stride + 2) + few.rows * (few.score_stride + 1) + limits +
                              step.sizes.rotary_dim + 64);
  few.limits = reinterpret_cast<RowLimits*>(p);
  few.query = p + (limits + 15) / 16 * 16;
  few.sums = few.query + few.all * few.q_stride;
  few.scores = few.sums + few.all * few.v_stride;
  few.max = few.scores + few.rows * few.score_stride;
  few.total = few.max + few.all;
  few.factors = few.total + few.all;
  float* angles = few.factors + few.rows;
  for (std::int64_t t = 0; t < group.tokens; ++t) {
    const RowLimits limit = limits_of(step, group, group.first_token + t);
    load_angles(step, limit.position, angles);
    for (std::int64_t h = 0; h < few.heads_per_kv; ++h) few.limits[t * few.heads_per_kv + h] = limit;
    for (std::int64_t g = 0; g < group.heads; ++g) {
      for (std::int64_t h = 0; h < few.heads_per_kv; ++h) {
        const std::int64_t row = g * few.rows + t * few.heads_per_kv + h;
        const std::int64_t head = (group.first_head + g) * few.heads_per_kv + h;
        load_query(step, group.first_token + t, head, angles, few.query + row * few.q_stride);
      }
    }
  }
  for (std::int64_t i = 0; i < few.all * few.v_stride; ++i) few.sums[i] = 0.f;
  for (std::int64_t i = 0; i < few.all; ++i) {
    few.max[i] = -kInfinity;
    few.total[i] = 0.f;
  }
  return few;
}

// One KV head of one tile.
template <Type kType>
void few_head(const Step& step, const Group& group, const FewRows& few, const Tile& tile, const Tile* next,
              std::int64_t i) {
  const std::int64_t g = group.first_head + i;
  const std::int64_t D = step.sizes.D, Dv = step.sizes.Dv;
  const std::uint8_t* rows[kMaxTile + 16];
  for (std::int64_t j = 0; j < tile.count; ++j) rows[j] = tile.key[j] + g * step.kv.key.head_stride;
  for (std::int64_t j = tile.count; j < padded(tile.count); ++j) rows[j] = rows[tile.count - 1];
  if (next != nullptr) {
    for (std::int64_t j = 0; j < next->count; ++j) {
      prefetch_row(next->key[j] + g * step.kv.key.head_stride, step.kv.key.head_stride);
    }
  }
  dot_tile<kType>(few, few.query + i * few.rows * few.q_stride, rows, tile.count, D);
  const bool masked = !tile.all_visible(few.limits[0], few.limits[few.rows - 1]);
  for (std::int64_t r = 0; r < few.rows; ++r) {
    float* scores = few.scores + r * few.score_stride;
    if (step.kv.k_scale != nullptr) {
      for (std::int64_t j = 0; j < tile.count; ++j) scores[j] *= step.kv.k_scale[tile.scale[j] + g * step.sizes.B];
    }
    shape_scores(step, tile, few.limits[r], g * few.heads_per_kv + r % few.heads_per_kv, masked, scores);
    few.factors[r] = softmax_row(scores, tile.count, few.max + i * few.rows + r, few.total + i * few.rows + r);
    if (step.kv.v_scale != nullptr) {
      for (std::int64_t j = 0; j < tile.count; ++j) {
        // What a row does not see has weight 0, and a scale that nobody wrote may be NaN.
        if (!masked || tile.sees(few.limits[r], j)) scores[j] *= step.kv.v_scale[tile.scale[j] + g * step.sizes.B];
      }
    }
  }
  float* sums = few.sums + i * few.rows * few.v_stride;
  for (std::int64_t j = 0; j < tile.count; ++j) rows[j] = tile.value[j] + g * step.kv.value.head_stride;
  if (masked && !rows_finite<kType>(rows, tile.count, Dv)) {
    weigh_strictly(step, few, tile, g, sums);
    return;
  }
  if (next != nullptr && !step.config.latent) {
    for (std::int64_t j = 0; j < next->count; ++j) {
      prefetch_row(next->value[j] + g * step.kv.value.head_stride, step.kv.value.head_stride);
    }
  }
  weigh_tile<kType>(few, rows, tile.count, Dv, sums);
}

void attend_few(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch) {
  const std::int64_t keys = few_tile(step);
  const FewRows few = prepare_few(step, group, keys, scratch);
  Tile tiles[2];
  const auto end_of = [&](std::int64_t begin) {
    const std::int64_t end = begin / keys * keys + keys;  // tiles lie on a fixed grid of positions
    return end < unit.end ? end : unit.end;
  };
  int current = 0;
  tiles[0].find(step, group.sequence, unit.begin, end_of(unit.begin));
  for (std::int64_t begin = unit.begin; begin < unit.end;) {
    const std::int64_t end = end_of(begin);
    Tile* next = nullptr;
    if (end < unit.end) {
      next = &tiles[1 - current];
      next->find(step, group.sequence, end, end_of(end));
    }
    for_cache_type(step.kv.key.type, [&](auto type) {
      for (std::int64_t i = 0; i < group.heads; ++i) {
        few_head<decltype(type)::value>(step, group, few, tiles[current], next, i);
      }
    });
    current = 1 - current;
    begin = end;
  }
  leave_rows(step, group, few.max, few.total, few.sums, few.v_stride, partial);
}

}  // namespace
}  // namespace pagegraft
