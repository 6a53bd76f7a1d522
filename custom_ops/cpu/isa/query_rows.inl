// What both attention loops need: prepared query rows, the keys of a tile, and the treatment of scores.
namespace pagegraft {
namespace {

struct RowLimits {
  std::int64_t begin, end;  // visible positions
  std::int64_t position;
};

inline RowLimits limits_of(const Step& step, const Group& group, std::int64_t token) {
  const std::int64_t position = step.past[group.sequence] + token - step.cumulative[group.sequence];
  const VisibleRange range = visible_range(step.config, position, step.total_tokens(group.sequence));
  return {range.begin, range.end, position};
}

// Loads query head `head` of packed token `token`: normalised, rotated, times the score scale and the key cache's
// static scale, zero-padded to whole vectors. `angles` as load_angles left them.
void load_query(const Step& step, std::int64_t token, std::int64_t head, const float* angles, float* row) {
  const std::int64_t D = step.sizes.D;
  load_head(step, step.query.at(token, head), step.q_norm, angles, row);
  const Quant quant = step.config.k_quant;
  if (quant == Quant::kPerTensor || quant == Quant::kPerChannel) {
    const RowScale s = row_scale(step.call.in[contract::kKScale], quant, head / (step.sizes.H / step.sizes.G), D);
    for (std::int64_t i = 0; i < D; ++i) row[i] *= step.scale * s.scales[i * s.per_channel];
  } else {
    for (std::int64_t i = 0; i < D; ++i) row[i] *= step.scale;
  }
  for (std::int64_t i = D; i < padded(D); ++i) row[i] = 0.f;
}

// Positions that one Tile can hold.
constexpr std::int64_t kMaxTile = 1024;

// An order in which to list groups of kGroup tokens that adjoin in memory, for rows that see all of [begin, end). It leaves
// the tokens of a vector in that vector.
struct GroupOrder {
  static constexpr std::int64_t kGroup = 16;

  std::int64_t begin = 0, end = 0;
  std::int64_t place[kGroup] = {};  // within its group, of the token that is listed here
  std::int64_t bytes[kGroup] = {};  // from the group's first row, of keys or of values, to that of the token
  std::int32_t lane[kGroup] = {};   // place % W
};

// Where the keys and values of consecutive positions lie; heads are reached by adding head * head_stride.
struct Tile {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  bool unmapped = false;  // some position has no block
  GroupOrder order;
  // Padded with the last row, for loops over whole vectors of positions.
  const std::uint8_t* key[kMaxTile + 16];
  const std::uint8_t* value[kMaxTile + 16];
  std::int64_t scale[kMaxTile];  // index of the token's scale of head 0; heads advance by block_size
  bool mapped[kMaxTile];

  // Lists the positions from `first` to before `last`: in order, but for groups that `order` is for.
  void find(const Step& step, std::int64_t sequence, std::int64_t first, std::int64_t last) {
    begin = first;
    count = last - first;
    unmapped = false;
    const std::int64_t B = step.sizes.B, G = step.sizes.G;
    const KvView &keys = step.kv.key, &values = step.kv.value;
    const std::int32_t* row = step.table + sequence * step.sizes.M;
    const std::int64_t shift = __builtin_ctzll(static_cast<unsigned long long>(B));  // B is a power of two
    for (std::int64_t j = 0, run; j < count; j += run) {
      const std::int64_t position = first + j, offset = position & (B - 1);
      const std::int64_t block = row[position >> shift];
      run = B - offset < count - j ? B - offset : count - j;
      // An unmapped position borrows block 0 as an address; it is masked, and its value counts as zero.
      const std::int64_t safe = block < 0 ? 0 : block;
      if (block < 0) unmapped = true;
      const std::uint8_t *k = keys.token(safe, offset), *v = values.token(safe, offset);
      constexpr std::int64_t kGroup = GroupOrder::kGroup;
      const std::int64_t first_scale = safe * G * B + offset;
      if (run >= kGroup && position % kGroup == 0 && position >= order.begin && position + kGroup <= order.end) {
        run = kGroup;
        for (std::int64_t i = 0; i < kGroup; ++i) {
          key[j + i] = k + order.bytes[i];
          value[j + i] = v + order.bytes[i];
          scale[j + i] = first_scale + order.place[i];
        }
      } else {
        for (std::int64_t i = 0; i < run; ++i) {
          key[j + i] = k + i * keys.token_stride;
          value[j + i] = v + i * values.token_stride;
          scale[j + i] = first_scale + i;
        }
      }
      for (std::int64_t i = 0; i < run; ++i) mapped[j + i] = block >= 0;
    }
    for (std::int64_t k = count; k < count + 16; ++k) {
      key[k] = key[count - 1];
      value[k] = value[count - 1];
    }
  }

  bool sees(const RowLimits& limits, std::int64_t j) const {
    return mapped[j] && begin + j >= limits.begin && begin + j < limits.end;
  }

  // True when every one of these rows sees every one of positions [from, to) of the tile.
  bool all_visible(const RowLimits& first, const RowLimits& last, std::int64_t from, std::int64_t to) const {
    return !unmapped && begin + from >= last.begin && begin + to <= first.end;
  }
};

}  // namespace
}  // namespace pagegraft
