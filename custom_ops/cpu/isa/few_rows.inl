// Attention of few query rows, as in decoding. The caches are read once, in the order of memory: kDotKeys or kWeighKeys
// adjoining tokens side by side (where a page of memory holds several, one of each page), all their heads in turn, which
// is how the processor's own prefetching is at its best. All query heads of a KV head share each load of a key or value
// vector.
namespace pagegraft {
namespace {

// Calls take(pointer member, count) for all working memory.
template <class Take>
void lay_out(const Step& step, FewRows* few, Take take) {
  const std::int64_t all = padded(few->all), dot = few->padded_rows;
  take(&few->query, dot * few->q_stride);
  take(&few->sums, few->all * few->v_stride);
  take(&few->total, few->all * W);
  take(&few->max, all);
  take(&few->factors, all);
  take(&few->scores, dot * FewRows::kScoreStride);
  take(&few->key_head, dot);
  take(&few->value_head, few->all);
  take(&few->limits, few->rows);
  take(&few->angles, step.sizes.rotary_dim);
  if (few->w_stride == 0) return;
  take(&few->words, dot * few->w_stride);
  take(&few->units, dot * kDotKeys);
  take(&few->surplus, dot * kDotKeys);
  take(&few->weight_words, (few->all + 1) * kFewTile);
  take(&few->weight_units, (few->all + 1) * kWeightGroups);
  take(&few->weight_sums, (few->all + 1) * kWeightGroups);
}

template <Type kType>
FewRows reserve_few(const Step& step, const Group& group, Scratch* scratch) {
  FewRows few{};
  few.heads_per_kv = step.sizes.H / step.sizes.G;
  few.rows = group.tokens * few.heads_per_kv;
  few.all = few.rows * group.heads;
  few.padded_rows = (few.all + kDotRows - 1) / kDotRows * kDotRows;
  few.q_stride = padded(step.sizes.D);
  few.v_stride = padded(step.sizes.Dv);
  if constexpr (kInWords<kType>) {
    few.w_stride = (step.sizes.D + kChunk<kType> - 1) / kChunk<kType> * kChunk<kType>;
    few.v_stride = (step.sizes.Dv + kChunk<kType> - 1) / kChunk<kType> * kChunk<kType>;
  }
  const auto lines = [](const auto* member, std::int64_t count) {
    return (count * static_cast<std::int64_t>(sizeof(**member)) + 63) / 64;
  };
  std::int64_t total = 0;
  lay_out(step, &few, [&](auto* member, std::int64_t count) { total += lines(member, count); });
  auto* next = reinterpret_cast<std::uint8_t*>(scratch->reserve(total * 16));
  lay_out(step, &few, [&](auto* member, std::int64_t count) {
    *member = reinterpret_cast<std::remove_reference_t<decltype(*member)>>(next);
    next += lines(member, count) * 64;
  });
  return few;
}

template <Type kType>
FewRows prepare_few(const Step& step, const Group& group, Scratch* scratch) {
  const FewRows few = reserve_few<kType>(step, group, scratch);
  const auto row_of = [&](std::int64_t g, std::int64_t t, std::int64_t h) {
    return g * few.rows + t * few.heads_per_kv + h;
  };
  for (std::int64_t t = 0; t < group.tokens; ++t) {
    const RowLimits limit = limits_of(step, group, group.first_token + t);
    load_angles(step, limit.position, few.angles);
    for (std::int64_t h = 0; h < few.heads_per_kv; ++h) few.limits[row_of(0, t, h)] = limit;
    for (std::int64_t g = 0; g < group.heads; ++g) {
      for (std::int64_t h = 0; h < few.heads_per_kv; ++h) {
        const std::int64_t row = row_of(g, t, h), head = (group.first_head + g) * few.heads_per_kv + h;
        load_query(step, group.first_token + t, head, few.angles, few.query + row * few.q_stride);
        few.key_head[row] = (group.first_head + g) * step.kv.key.head_stride;
        few.value_head[row] = (group.first_head + g) * step.kv.value.head_stride;
      }
    }
  }
  for (std::int64_t row = few.all; row < few.padded_rows; ++row) {
    std::memset(few.query + row * few.q_stride, 0, static_cast<std::size_t>(few.q_stride) * sizeof(float));
    few.key_head[row] = few.key_head[few.all - 1];
  }
  if constexpr (kInWords<kType>) queries_to_words<kType>(few, step.sizes.D);
  std::memset(few.sums, 0, static_cast<std::size_t>(few.all * few.v_stride) * sizeof(float));
  std::memset(few.total, 0, static_cast<std::size_t>(few.all * W) * sizeof(float));
  for (std::int64_t i = 0; i < padded(few.all); ++i) few.max[i] = -kInfinity;
  return few;
}

template <Type kType>
void few_piece(const Step& step, const Group& group, const FewRows& few, const Piece& piece) {
  const std::int64_t count = piece.to - piece.from;
  fetch_scales(step, group, piece);
  if constexpr (kInWords<kType>) {
    dot_words_tile<kType>(step, few, piece);
  } else {
    dot_tile<kType>(step, few, piece);
  }
  weights_of(step, group, few, piece);
  carry_sums(few);
  if constexpr (kInWords<kType>) {
    if (weights_to_words(few, count)) return weigh_words_tile<kType>(step, few, piece);
  } else {
    // What some row must not see, and the last value where weigh_tile fills up with it: not even times zero.
    const std::int64_t checked = piece.masked ? count : count % Simd::kWeighKeys == 0 ? 0 : 1;
    bool finite = true;
    for (std::int64_t r = 0; r < few.all; r += few.rows) {
      const std::uint8_t* const* values = piece.tile->value + piece.to - checked;
      finite = finite && rows_finite<kType>(values, few.value_head[r], checked, step.sizes.Dv);
    }
    if (finite) return weigh_tile<kType>(step, few, piece);
  }
  weigh_strictly(step, few, piece, element_at<kType>);
}

// The states as leave_rows takes them: one total a row, and sums in the order of channels.
template <Type kType>
void gather_states(const FewRows& few) {
  for (std::int64_t r = 0; r < few.all; ++r) few.total[r] = Simd::reduce_add(Simd::load(few.total + r * W));
  for (std::int64_t r = 0; r < few.all; ++r) order_elements<kType>(few.sums + r * few.v_stride, few.v_stride);
}

// Each of kWeighKeys tokens side by side from a page of its own, each page from its first token to its last: the processor's
// own fetching follows one stream a page. Only where rows fill pages evenly, and no slope asks for a token's position.
inline GroupOrder page_order(const Step& step, const FewRows& few) {
  constexpr std::int64_t kPage = 4096, kLanes = Simd::kWeighKeys;
  GroupOrder order;
  const std::int64_t stride = step.kv.key.token_stride, apart = kPage / stride;
  const bool even = stride * apart == kPage && (apart == 2 || apart == 4) && step.kv.value.token_stride == stride;
  if (kDotKeys == 1 || !even || !step.config.slopes.empty()) return order;
  order.begin = few.limits[few.rows - 1].begin;
  order.end = few.limits[0].end;
  for (std::int64_t i = 0; i < GroupOrder::kGroup; ++i) {
    const std::int64_t pages = i / (kLanes * apart) * kLanes, in_page = i / kLanes % apart;
    order.place[i] = (pages + i % kLanes) * apart + in_page;
    order.lane[i] = static_cast<std::int32_t>(order.place[i] % W);
    order.bytes[i] = order.place[i] * stride;
  }
  return order;
}

template <Type kType>
void attend_few_of(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch) {
  const FewRows few = prepare_few<kType>(step, group, scratch);
  Tile tile;
  tile.order = page_order(step, few);
  tile.find(step, group.sequence, unit.begin, unit.end);
  for (std::int64_t from = 0; from < tile.count;) {
    const std::int64_t position = unit.begin + from;
    const std::int64_t end = position / kFewTile * kFewTile + kFewTile - unit.begin;  // on a fixed grid of positions
    const std::int64_t to = end < tile.count ? end : tile.count;
    const bool masked = !tile.all_visible(few.limits[0], few.limits[few.rows - 1], from, to);
    few_piece<kType>(step, group, few, {&tile, from, to, masked});
    from = to;
  }
  gather_states<kType>(few);
  leave_rows(step, group, few.max, few.total, few.sums, few.v_stride, partial);
}

void attend_few(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch) {
  for_cache_type(step.kv.key.type, [&](auto type) {
    attend_few_of<decltype(type)::value>(step, group, unit, partial, scratch);
  });
}

}  // namespace
}  // namespace pagegraft
