// Many query rows: the working memory, and what happens to one panel of rows against one tile.
namespace pagegraft {
namespace {

constexpr std::int64_t kTile = 64;            // keys
constexpr std::int64_t kPanel = 2 * Simd::W;  // rows

struct ManyRows {
  std::int64_t rows;
  std::int64_t panels;
  std::int64_t k_stride, v_stride;  // floats
  float* query;   // [panels][D][kPanel]
  float* sums;    // [panels * kPanel][v_stride]
  float* max;     // [panels * kPanel]
  float* total;   // [panels * kPanel]
  float* slopes;  // [panels * kPanel]
  float* keys;    // [kTile + kTileKeys][k_stride]
  float* values;  // [kTile][v_stride], or the keys when LATENT
  float* scores;  // [kTile + kTileKeys][kPanel]
  RowLimits* limits;  // [panels * kPanel]
};

// Keys of a tile that some row of a panel sees, whole microtiles at the lower end.
struct Span {
  std::int64_t from, to;
};

inline Span span_of(const Tile& tile, const RowLimits& low, const RowLimits& high) {
  const std::int64_t from = low.begin - tile.begin, to = high.end - tile.begin;
  return {from > 0 ? from / Simd::kTileKeys * Simd::kTileKeys : 0, to < tile.count ? to : tile.count};
}

// scores[k][row] = keys[k] . query[row] for kKeys keys and one panel.
template <int kKeys>
inline void tile_dots(const float* keys, std::int64_t k_stride, const float* query, std::int64_t D, float* scores) {
  F acc[kKeys][2];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) acc[k][0] = acc[k][1] = Simd::zero();
  for (std::int64_t d = 0; d < D; ++d) {
    const F q0 = Simd::load(query + d * kPanel), q1 = Simd::load(query + d * kPanel + W);
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const F key = Simd::set1(keys[k * k_stride + d]);
      acc[k][0] = Simd::fma(key, q0, acc[k][0]);
      acc[k][1] = Simd::fma(key, q1, acc[k][1]);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
    Simd::store(scores + k * kPanel, acc[k][0]);
    Simd::store(scores + k * kPanel + W, acc[k][1]);
  }
}

// sums[r] = factors[r] * sums[r] + weights[.][r] . values for kRows rows and kVectors vectors of channels.
template <int kRows, int kVectors>
inline void tile_weigh(const float* weights, const float* factors, const float* values, std::int64_t v_stride,
                       std::int64_t count, float* sums, std::int64_t s_stride) {
  F acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = Simd::mul(Simd::set1(factors[r]), Simd::load(sums + r * s_stride + v * W));
    }
  }
  for (std::int64_t k = 0; k < count; ++k) {
    F value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = Simd::load(values + k * v_stride + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F p = Simd::set1(weights[k * kPanel + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::fma(p, value[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Simd::store(sums + r * s_stride + v * W, acc[r][v]);
  }
}

template <Type kType>
void widen_row(const std::uint8_t* row, std::int64_t n, float scale, float* out) {
  const F s = Simd::set1(scale);
  std::int64_t i = 0;
  for (; i + W <= n; i += W) Simd::store(out + i, Simd::mul(s, load_stored<kType>(row + stored_bytes<kType>(i))));
  if (i == n) return;
  Simd::store(out + i, Simd::mul(s, load_tail<kType>(row + stored_bytes<kType>(i), n - i)));
  for (std::int64_t k = n; k < padded(n); ++k) out[k] = 0.f;
}

// Widens one head of a tile; unmapped positions and the rows up to a whole microtile become zeros.
template <Type kType>
void widen_tile(const Tile& tile, const std::uint8_t* const* rows, std::int64_t offset, std::int64_t n,
                const float* scales, float* out) {
  const std::int64_t stride = padded(n);
  for (std::int64_t j = 0; j < tile.count; ++j) {
    // One head's rows lie a whole token apart, which no hardware prefetcher follows. The pointers are padded by 16.
    for (std::int64_t i = 0; i < stored_bytes<kType>(n); i += 64) __builtin_prefetch(rows[j + 8] + offset + i);
    if (tile.mapped[j]) {
      widen_row<kType>(rows[j] + offset, n, scales == nullptr ? 1.f : scales[tile.scale[j]], out + j * stride);
    } else {
      std::memset(out + j * stride, 0, static_cast<std::size_t>(stride) * sizeof(float));
    }
  }
  const std::int64_t rest = (tile.count + Simd::kTileKeys - 1) / Simd::kTileKeys * Simd::kTileKeys;
  std::memset(out + tile.count * stride, 0, static_cast<std::size_t>((rest - tile.count) * stride) * sizeof(float));
}

bool all_finite(const float* values, std::int64_t n) {
  F sum = Simd::zero();
  for (std::int64_t i = 0; i < n; i += W) sum = Simd::fma(Simd::load(values + i), Simd::zero(), sum);
  return Simd::reduce_add(sum) == 0.f;
}

// ALiBi and softcap of a panel's scores.
void shape_panel(const Step& step, const ManyRows& many, const Tile& tile, std::int64_t first, const Span& span) {
  if (!step.config.slopes.empty()) {
    for (std::int64_t v = 0; v < kPanel; v += W) {
      alignas(64) float offsets[Simd::W];
      for (std::int64_t r = 0; r < W; ++r) {
        offsets[r] = static_cast<float>(tile.begin - many.limits[first + v + r].position);
      }
      const F slope = Simd::load(many.slopes + first + v), offset = Simd::load(offsets);
      for (std::int64_t j = span.from; j < span.to; ++j) {
        float* s = many.scores + j * kPanel + v;
        Simd::store(s, Simd::fma(slope, Simd::add(offset, Simd::set1(static_cast<float>(j))), Simd::load(s)));
      }
    }
  }
  if (step.config.softcap > 0.f) {
    const F cap = Simd::set1(step.config.softcap), inverse = Simd::set1(1.f / step.config.softcap);
    for (std::int64_t i = span.from * kPanel; i < span.to * kPanel; i += W) {
      Simd::store(many.scores + i, Simd::mul(cap, tanh(Simd::mul(Simd::load(many.scores + i), inverse))));
    }
  }
}

void mask_panel(const ManyRows& many, const Tile& tile, std::int64_t first, const Span& span) {
  const F hidden = Simd::set1(-kInfinity);
  for (std::int64_t v = 0; v < kPanel; v += W) {
    alignas(64) float begins[Simd::W], ends[Simd::W];
    for (std::int64_t r = 0; r < W; ++r) {
      const RowLimits& limits = many.limits[first + v + r];
      const auto relative = [&](std::int64_t p) {
        const std::int64_t d = p - tile.begin;
        return static_cast<float>(d < 0 ? 0 : d > kTile ? kTile : d);
      };
      begins[r] = relative(limits.begin);
      ends[r] = relative(limits.end);
    }
    const F begin = Simd::load(begins), end = Simd::load(ends);
    for (std::int64_t j = span.from; j < span.to; ++j) {
      float* s = many.scores + j * kPanel + v;
      const F at = Simd::set1(static_cast<float>(j));
      const F seen = Simd::select_less(at, begin, hidden, Simd::select_less(at, end, Simd::load(s), hidden));
      Simd::store(s, tile.mapped[j] ? seen : hidden);
    }
  }
}

// Scores to exponentials; moves the panel's states on and leaves the factors of its earlier sums.
void softmax_panel(const ManyRows& many, const Span& span, std::int64_t first, float* factors) {
  for (std::int64_t v = 0; v < kPanel; v += W) {
    const F before = Simd::load(many.max + first + v);
    F top = before;
    for (std::int64_t j = span.from; j < span.to; ++j) {
      const F s = Simd::load(many.scores + j * kPanel + v);
      top = Simd::select_less(top, s, s, top);
    }
    const F base = finite_max(top), factor = carry(before, top);
    F sum = Simd::zero();
    for (std::int64_t j = span.from; j < span.to; ++j) {
      const F p = exp(Simd::sub(Simd::load(many.scores + j * kPanel + v), base));
      Simd::store(many.scores + j * kPanel + v, p);
      sum = Simd::add(sum, p);
    }
    Simd::store(many.max + first + v, top);
    Simd::store(many.total + first + v, Simd::fma(Simd::load(many.total + first + v), factor, sum));
    Simd::store(factors + v, factor);
  }
}

void weigh_panel(const ManyRows& many, const Span& span, std::int64_t first, const float* factors,
                 std::int64_t channels, std::int64_t value_stride) {
  constexpr int kRows = Simd::kTileRows;
  const float* weights = many.scores + span.from * kPanel;
  const float* values = many.values + span.from * value_stride;
  const std::int64_t count = span.to - span.from;
  std::int64_t c = 0;
  for (; c + 2 * W <= channels; c += 2 * W) {
    for (std::int64_t r = 0; r < kPanel; r += kRows) {
      tile_weigh<kRows, 2>(weights + r, factors + r, values + c, value_stride, count,
                           many.sums + (first + r) * many.v_stride + c, many.v_stride);
    }
  }
  for (; c < channels; c += W) {
    for (std::int64_t r = 0; r < kPanel; r += kRows) {
      tile_weigh<kRows, 1>(weights + r, factors + r, values + c, value_stride, count,
                           many.sums + (first + r) * many.v_stride + c, many.v_stride);
    }
  }
}

// As weigh_panel for a tile in which some row must not see a value that is NaN or infinite: not even times zero.
void weigh_panel_strictly(const ManyRows& many, const Tile& tile, std::int64_t first, const float* factors,
                          std::int64_t channels, std::int64_t value_stride) {
  for (std::int64_t r = 0; r < kPanel; ++r) {
    float* sums = many.sums + (first + r) * many.v_stride;
    for (std::int64_t c = 0; c < channels; ++c) sums[c] *= factors[r];
    for (std::int64_t j = 0; j < tile.count; ++j) {  // within what the panel sees, by the test
      if (!tile.sees(many.limits[first + r], j)) continue;
      const float p = many.scores[j * kPanel + r];
      for (std::int64_t c = 0; c < channels; ++c) sums[c] += p * many.values[j * value_stride + c];
    }
  }
}

}  // namespace
}  // namespace pagegraft
