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
  few.state_stride = padded(few.rows);
  few.in_hand = few.rows * few.score_stride + few.state_stride;
  const std::int64_t limits = few.rows * static_cast<std::int64_t>(sizeof(RowLimits) / sizeof(float)) + 15;
  float* p = scratch->reserve(few.all * (few.q_stride + few.v_stride + W) + group.heads * few.state_stride +
                              2 * few.in_hand + limits + step.sizes.rotary_dim);
  few.limits = reinterpret_cast<RowLimits*>(p);
  few.query = p + limits / 16 * 16;
  few.sums = few.query + few.all * few.q_stride;
  few.total = few.sums + few.all * few.v_stride;
  few.max = few.total + few.all * W;
  few.factors = few.max + group.heads * few.state_stride;
  few.scores = few.factors + few.state_stride;
  *angles = few.factors + 2 * few.in_hand;
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
        arrange(step, step.sizes.D, few.query + row * few.q_stride, false);
      }
    }
  }
  std::memset(few.sums, 0, static_cast<std::size_t>(few.all * few.v_stride) * sizeof(float));
  std::memset(few.total, 0, static_cast<std::size_t>(few.all * W) * sizeof(float));
  for (std::int64_t i = 0; i < group.heads * few.state_stride; ++i) few.max[i] = -kInfinity;
  return few;
}

// All KV heads of one piece; the next piece, if any, is fetched meanwhile. A head's scores are computed before the values
// of the head before it are weighed, so that the latencies of its softmax pass under the next head's products.
template <Type kType>
void few_piece(const Step& step, const Group& group, const FewRows& few, const Piece& piece, std::int64_t next_to) {
  const Tile& tile = *piece.tile;
  const std::int64_t count = piece.to - piece.from, Dv = step.sizes.Dv;
  const std::int64_t last = piece.to - (next_to == piece.to);  // some row, when there is no next piece
  Fetcher fetcher(step, tile.key + last, tile.value + last, next_to - piece.to);
  const FewRows halves[2] = {few, few.other()};
  const auto dot = [&](std::int64_t i) {
    dot_tile<kType>(halves[i % 2], few.query + i * few.rows * few.q_stride, tile.key + piece.from,
                    (group.first_head + i) * step.kv.key.head_stride, count, step.sizes.D, &fetcher);
  };
  dot(0);
  for (std::int64_t i = 0; i < group.heads; ++i) {
    const FewRows& mine = halves[i % 2];
    const std::int64_t g = group.first_head + i, value_head = g * step.kv.value.head_stride;
    float* sums = few.sums + i * few.rows * few.v_stride;
    weights_of(step, mine, piece, g, i);
    if (i + 1 < group.heads) dot(i + 1);
    if (piece.masked && !rows_finite<kType>(tile.value + piece.from, value_head, count, Dv)) {
      weigh_strictly(step, mine, piece, g, sums);
    } else {
      weigh_tile<kType>(mine, tile.value + piece.from, value_head, count, Dv, sums, &fetcher);
    }
  }
}

// The states as leave_rows takes them: one maximum and one total a row, side by side, and sums in the order of channels.
void gather_states(const Step& step, const Group& group, const FewRows& few) {
  for (std::int64_t i = 0; i < group.heads; ++i) {
    for (std::int64_t r = 0; r < few.rows; ++r) few.max[i * few.rows + r] = few.max[i * few.state_stride + r];
  }
  for (std::int64_t r = 0; r < few.all; ++r) few.total[r] = Simd::reduce_add(Simd::load(few.total + r * W));
  for (std::int64_t r = 0; r < few.all; ++r) arrange(step, step.sizes.Dv, few.sums + r * few.v_stride, true);
}

// Fetches a range's first tile, which no tile before it does, while the query rows are prepared.
void fetch_first(const Step& step, const Tile& tile, std::int64_t count) {
  for (std::int64_t j = 0; j < count; ++j) {
    for (std::int64_t i = 0; i < step.kv.key.token_stride; i += 64) __builtin_prefetch(tile.key[j] + i, 0, 2);
    if (step.config.latent) continue;
    for (std::int64_t i = 0; i < step.kv.value.token_stride; i += 64) __builtin_prefetch(tile.value[j] + i, 0, 2);
  }
}

void attend_few(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch) {
  const std::int64_t length = few_tile(step);
  Tile tile;
  tile.find(step, group.sequence, unit.begin, unit.end);
  fetch_first(step, tile, length < tile.count ? length : tile.count);
  const FewRows few = prepare_few(step, group, length, scratch);
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
  gather_states(step, group, few);
  leave_rows(step, group, few.max, few.total, few.sums, few.v_stride, partial);
}

}  // namespace
}  // namespace pagegraft
