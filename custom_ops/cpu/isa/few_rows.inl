// Attention of few query rows, as in decoding. The caches are read once; all query heads of a KV head share each load of
// a key or value vector, and while one tile of positions is worked on the next is fetched, in the order of memory and
// interleaved with the arithmetic. (Fetching in bursts does not overlap with it: the bursts fill the reorder buffer.)
namespace pagegraft {
namespace {

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
