// Attention of few query rows, as in decoding. The caches are read once; all query heads of a KV head share each load of
// a key or value vector, and while one tile of positions is worked on the next is fetched, in the order of memory and
// interleaved with the arithmetic. (Fetching in bursts does not overlap with it: the bursts fill the reorder buffer.)
namespace pagegraft {
namespace {

// Positions of one tile: about 32 KiB of keys, so that the tile and the next one, keys and values, stay in the
// second-level cache.
constexpr std::int64_t kFewTile = 128;

inline std::int64_t few_tile(const Step& step) {
  std::int64_t keys = kFewTile;
  while (keys > 16 && keys * step.kv.key.token_stride > 32 * 1024) keys /= 2;
  return keys;
}

struct FewRows {
  std::int64_t rows;      // per KV head
  std::int64_t all;       // rows * KV heads
  std::int64_t q_stride;  // floats
  std::int64_t v_stride;
  std::int64_t score_stride;
  std::int64_t heads_per_kv;
  float* query;       // [all][q_stride]
  float* sums;        // [all][v_stride]
  float* max;         // [all]
  float* total;       // [all]
  float* scores;      // [rows][score_stride]
  float* factors;     // [rows]
  RowLimits* limits;  // [rows]
};

// Walks over the rows of the next tile in the order of memory, a stretch at a time.
struct Fetcher {
  const std::uint8_t* const* rows = nullptr;
  std::int64_t count = 0;
  std::int64_t stride = 0;
  std::int64_t row = 0;
  std::int64_t offset = 0;

  // Start of the next `bytes` to fetch. A stretch may run over the end of a row: rows of a block adjoin.
  const std::uint8_t* take(std::int64_t bytes) {
    if (row >= count) return rows[0];  // all fetched: what is there already costs nothing
    const std::uint8_t* start = rows[row] + offset;
    offset += bytes;
    while (offset >= stride) {
      offset -= stride;
      ++row;
    }
    return start;
  }
};

template <std::int64_t kBytes>
inline void fetch(const std::uint8_t* p) {
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Scores of kRows query rows against kKeys = W / kRows keys.
template <Type kType, int kRows>
inline void dot_block(const float* query, std::int64_t q_stride, const std::uint8_t* const* keys, std::int64_t head,
                      std::int64_t D, float* scores, std::int64_t score_stride, const std::uint8_t* ahead) {
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
  for (; d + W <= D; d += W) {
    fetch<kBytes>(ahead);
    ahead += kBytes;
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
    const std::uint8_t* ahead = r == 0 ? fetcher->take(bytes) : keys[j] + head;
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

// One tile's positions within the unit's, for one KV head.
struct Piece {
  const Tile* tile;
  std::int64_t from, to;
  bool masked;  // some row does not see some position
};

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
    few.factors[r] = softmax_row(scores, count, few.max + i * few.rows + r, few.total + i * few.rows + r);
    if (step.kv.v_scale != nullptr) scale_weights(piece, few.limits[r], v_scales, scores);
  }
}

// sums[r] = factors[r] * sums[r] + weights[r] . values, for kRows rows and kVectors vectors of channels. `offset` is that
// of the first channel within a stored row.
template <Type kType, int kRows, int kVectors>
inline void weigh_block(const FewRows& few, const float* weights, const float* factors,
                        const std::uint8_t* const* values, std::int64_t offset, std::int64_t count, float* sums,
                        const std::uint8_t* ahead) {
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
    fetch<kBytes>(ahead);
    ahead += kBytes;
    F value[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) value[v] = load_stored<kType>(values[j] + offset + stored_bytes<kType>(v * W));
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
    return r == 0 ? fetcher->take(count * stored_bytes<kType>(channels)) : values[0] + head;
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
      for (std::int64_t i = 0; i < step.sizes.Dv; ++i) target[i] += p * stored_value(step.kv.value.type, row, i);
    }
  }
}

FewRows reserve_few(const Step& step, const Group& group, std::int64_t tile, float** angles, Scratch* scratch) {
  FewRows few;
  few.heads_per_kv = step.sizes.H / step.sizes.G;
  few.rows = group.tokens * few.heads_per_kv;
  few.all = few.rows * group.heads;
  few.q_stride = padded(step.sizes.D);
  few.v_stride = padded(step.sizes.Dv);
  few.score_stride = tile + W;
  const std::int64_t limits = few.rows * static_cast<std::int64_t>(sizeof(RowLimits) / sizeof(float)) + 15;
  float* p = scratch->reserve(few.all * (few.q_stride + few.v_stride + 2) + few.rows * (few.score_stride + 1) + limits +
                              step.sizes.rotary_dim);
  few.limits = reinterpret_cast<RowLimits*>(p);
  few.query = p + limits / 16 * 16;
  few.sums = few.query + few.all * few.q_stride;
  few.scores = few.sums + few.all * few.v_stride;
  few.max = few.scores + few.rows * few.score_stride;
  few.total = few.max + few.all;
  few.factors = few.total + few.all;
  *angles = few.factors + few.rows;
  return few;
}

FewRows prepare_few(const Step& step, const Group& group, std::int64_t tile, Scratch* scratch) {
  float* angles;
  const FewRows few = reserve_few(step, group, tile, &angles, scratch);
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
  std::memset(few.sums, 0, static_cast<std::size_t>(few.all * few.v_stride) * sizeof(float));
  for (std::int64_t i = 0; i < few.all; ++i) {
    few.max[i] = -kInfinity;
    few.total[i] = 0.f;
  }
  return few;
}

// All KV heads of one piece; the next piece, if any, is fetched meanwhile.
template <Type kType>
void few_piece(const Step& step, const Group& group, const FewRows& few, const Piece& piece, std::int64_t next_to) {
  const Tile& tile = *piece.tile;
  const std::int64_t count = piece.to - piece.from, Dv = step.sizes.Dv;
  const bool latent = step.config.latent;
  Fetcher keys{tile.key + piece.to - (next_to == piece.to), next_to - piece.to, step.kv.key.token_stride, 0, 0};
  Fetcher values{tile.value + piece.to - (next_to == piece.to), latent ? 0 : next_to - piece.to,
                 step.kv.value.token_stride, 0, 0};
  for (std::int64_t i = 0; i < group.heads; ++i) {
    const std::int64_t g = group.first_head + i;
    const std::int64_t key_head = g * step.kv.key.head_stride, value_head = g * step.kv.value.head_stride;
    float* sums = few.sums + i * few.rows * few.v_stride;
    dot_tile<kType>(few, few.query + i * few.rows * few.q_stride, tile.key + piece.from, key_head, count, step.sizes.D,
                    &keys);
    weights_of(step, few, piece, g, i);
    if (piece.masked && !rows_finite<kType>(tile.value + piece.from, value_head, count, Dv)) {
      weigh_strictly(step, few, piece, g, sums);
    } else {
      weigh_tile<kType>(few, tile.value + piece.from, value_head, count, Dv, sums, &values);
    }
  }
}

void attend_few(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch) {
  const std::int64_t length = few_tile(step);
  const FewRows few = prepare_few(step, group, length, scratch);
  Tile tile;
  tile.find(step, group.sequence, unit.begin, unit.end);
  const auto end_of = [&](std::int64_t from) {
    const std::int64_t position = unit.begin + from;
    const std::int64_t end = position / length * length + length - unit.begin;  // on a fixed grid of positions
    return end < tile.count ? end : tile.count;
  };
  for_cache_type(step.kv.key.type, [&](auto type) {
    for (std::int64_t from = 0; from < tile.count; from = end_of(from)) {
      const std::int64_t to = end_of(from);
      const bool masked = !tile.all_visible(few.limits[0], few.limits[few.rows - 1], from, to);
      few_piece<decltype(type)::value>(step, group, few, {&tile, from, to, masked},
                                       to < tile.count ? end_of(to) : to);
    }
  });
  leave_rows(step, group, few.max, few.total, few.sums, few.v_stride, partial);
}

}  // namespace
}  // namespace pagegraft
