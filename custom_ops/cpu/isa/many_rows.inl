// Attention of many query rows on one KV head, as in prefill or absorbed latent attention: tiles of keys are widened to
// float32 once, then panels of two vectors of query rows pass over them. Scores are kept transposed, [key][row]: the
// softmax of a panel is then vertical, keys and weights enter the products as broadcasts, and nothing but the queries
// (once a unit) is ever transposed.
namespace pagegraft {
namespace {

void prepare_queries(const Step& step, const Group& group, const ManyRows& many, float* row, float* angles) {
  const std::int64_t D = step.sizes.D, heads_per_kv = step.sizes.H / step.sizes.G;
  for (std::int64_t i = 0; i < many.panels * kPanel; ++i) {
    const std::int64_t r = i < many.rows ? i : many.rows - 1;
    const RowPlace place = place_of(step, group, r);
    many.limits[i] = limits_of(step, group, place.token);
    many.slopes[i] = step.config.slopes.empty() ? 0.f : step.config.slopes.data()[place.head];
    many.max[i] = -kInfinity;
    many.total[i] = 0.f;
    float* target = many.query + i / kPanel * D * kPanel + i % kPanel;
    if (i >= many.rows) {
      for (std::int64_t d = 0; d < D; ++d) target[d * kPanel] = 0.f;
      continue;
    }
    if (r % heads_per_kv == 0) load_angles(step, many.limits[i].position, angles);
    load_query(step, place.token, place.head, angles, row);
    for (std::int64_t d = 0; d < D; ++d) target[d * kPanel] = row[d];
  }
  std::memset(many.sums, 0, static_cast<std::size_t>(many.panels * kPanel * many.v_stride) * sizeof(float));
}

ManyRows prepare_many(const Step& step, const Group& group, Scratch* scratch) {
  const std::int64_t D = step.sizes.D;
  ManyRows many;
  many.rows = rows_of(step, group).per_head;
  many.panels = (many.rows + kPanel - 1) / kPanel;
  many.k_stride = padded(D);
  many.v_stride = padded(step.sizes.Dv);
  const std::int64_t all = many.panels * kPanel, tile = kTile + Simd::kTileKeys;
  const std::int64_t limits = all * static_cast<std::int64_t>(sizeof(RowLimits) / sizeof(float));
  float* p = scratch->reserve(limits + all * (D + many.v_stride + 3) + tile * (many.k_stride + many.v_stride + kPanel) +
                              many.k_stride + step.sizes.rotary_dim);
  many.limits = reinterpret_cast<RowLimits*>(p);
  many.query = p + limits;
  many.sums = many.query + all * D;
  many.keys = many.sums + all * many.v_stride;
  many.values = step.config.latent ? many.keys : many.keys + tile * many.k_stride;
  many.scores = many.keys + tile * (many.k_stride + many.v_stride);
  many.max = many.scores + tile * kPanel;
  many.total = many.max + all;
  many.slopes = many.total + all;
  float* row = many.slopes + all;
  prepare_queries(step, group, many, row, row + many.k_stride);
  return many;
}

// All panels against one widened tile.
void many_tile(const Step& step, const ManyRows& many, const Tile& tile) {
  constexpr int kKeys = Simd::kTileKeys;
  const std::int64_t D = step.sizes.D, channels = many.v_stride;
  const std::int64_t value_stride = step.config.latent ? many.k_stride : many.v_stride;
  int finite = -1;  // not looked at yet
  for (std::int64_t panel = 0; panel < many.panels; ++panel) {
    const std::int64_t first = panel * kPanel;
    const RowLimits &low = many.limits[first], &high = many.limits[first + kPanel - 1];
    if (tile.begin >= high.end || tile.begin + tile.count <= low.begin) continue;
    const Span span = span_of(tile, low, high);
    for (std::int64_t j = span.from; j < span.to; j += kKeys) {
      tile_dots<kKeys>(many.keys + j * many.k_stride, many.k_stride, many.query + panel * D * kPanel, D,
                       many.scores + j * kPanel);
    }
    shape_panel(step, many, tile, first, span);
    const bool masked = !tile.all_visible(low, high, span.from, span.to);
    if (masked) mask_panel(many, tile, first, span);
    alignas(64) float factors[kPanel];
    softmax_panel(many, span, first, factors);
    if (masked && finite < 0) finite = all_finite(many.values, tile.count * value_stride) ? 1 : 0;
    if (masked && finite == 0) {
      weigh_panel_strictly(many, tile, first, factors, channels, value_stride);
    } else {
      weigh_panel(many, span, first, factors, channels, value_stride);
    }
  }
}

void attend_many(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch) {
  const ManyRows many = prepare_many(step, group, scratch);
  const std::int64_t g = group.first_head, B = step.sizes.B;
  const float* k_scale = step.kv.k_scale == nullptr ? nullptr : step.kv.k_scale + g * B;
  const float* v_scale = step.kv.v_scale == nullptr ? nullptr : step.kv.v_scale + g * B;
  Tile tile;
  for (std::int64_t begin = unit.begin; begin < unit.end;) {
    const std::int64_t grid = begin / kTile * kTile + kTile;
    const std::int64_t end = grid < unit.end ? grid : unit.end;
    tile.find(step, group.sequence, begin, end);
    for_cache_type(step.kv.key.type, [&](auto type) {
      constexpr Type kType = decltype(type)::value;
      widen_tile<kType>(tile, tile.key, g * step.kv.key.head_stride, step.sizes.D, k_scale, many.keys);
      if (!step.config.latent) {
        widen_tile<kType>(tile, tile.value, g * step.kv.value.head_stride, step.sizes.Dv, v_scale, many.values);
      }
    });
    many_tile(step, many, tile);
    begin = end;
  }
  leave_rows(step, group, many.max, many.total, many.sums, many.v_stride, partial);
}

}  // namespace
}  // namespace pagegraft
