// What the few-rows loops share: their working memory and the piece of positions in hand.
namespace pagegraft {
namespace {

// Positions of one tile: scores of all rows fit the first-level cache, and the upkeep of the states is spread out.
constexpr std::int64_t kFewTile = 128;
// Weights that have one unit where codes are read as words.
constexpr std::int64_t kWeightGroup = 16;
constexpr std::int64_t kWeightGroups = kFewTile / kWeightGroup;
// Query rows whose scores are computed together, with kDotKeys keys.
constexpr int kDotRows = 4;
constexpr int kDotKeys = Simd::W / kDotRows;

struct FewRows {
  std::int64_t rows;    // per KV head
  std::int64_t all;     // rows * KV heads; row r belongs to KV head r / rows
  std::int64_t padded_rows;  // all, filled up with zeros to whole blocks
  std::int64_t heads_per_kv;
  std::int64_t q_stride;  // floats
  std::int64_t v_stride;
  float* query;    // [padded_rows][q_stride]
  float* sums;     // [all][v_stride]
  float* total;    // [all][W], a part in each lane
  float* max;      // [all], as the next ones padded to whole vectors
  float* factors;  // [all], what earlier sums are multiplied by
  float* scores;   // [padded_rows][kScoreStride]
  std::int64_t* key_head;    // [padded_rows], bytes from a token's key to that of the row's KV head
  std::int64_t* value_head;  // [all]
  RowLimits* limits;         // [rows]
  float* angles;             // rotary angles of the token in hand
  // Where codes are read as words, see few_words.inl:
  std::int64_t w_stride;         // 0 otherwise
  std::int16_t* words;           // [padded_rows][w_stride], the query rows
  float* units;                  // [padded_rows][kDotKeys], the same for all keys
  std::int32_t* surplus;         // likewise
  std::int16_t* weight_words;    // [all + 1][kFewTile]
  float* weight_units;           // [all + 1][kWeightGroups]
  std::int32_t* weight_sums;     // likewise

  static constexpr std::int64_t kScoreStride = kFewTile + W;
};

// One tile's positions within the unit's.
struct Piece {
  const Tile* tile;
  std::int64_t from, to;
  bool masked;  // some row does not see some position
};

// Elements of a cache line.
template <Type kType>
constexpr std::int64_t kLine = 64 / stored_bytes<kType>(4) * 4;

// Where to fetch from while kStep tokens side by side are read: a little further on in their rows for the first-level cache,
// and some steps further for the second-level one, to which more can be on its way at once.
template <int kStep>
class Ahead {
 public:
  // `count` tokens are read from `rows`, then those of `after`.
  Ahead(const std::uint8_t* const* rows, std::int64_t count, const std::uint8_t* const* after, std::int64_t stride)
      : rows_(rows), after_(after), count_((count + kStep - 1) / kStep * kStep), stride_(stride) {
    const std::int64_t steps = kFar / stride;
    far_steps_ = steps < 1 ? 1 : steps > kMostSteps ? kMostSteps : steps;
  }

  // Moves on to the tokens from `j` on.
  void move(std::int64_t j) {
    now_ = rows_ + j;
    next_ = rows_from(j + kStep);
    far_ = rows_from(j + far_steps_ * kStep);
  }

  // Byte `offset` of the row of token `k`, or what lies that far on in the row of the token after it.
  const std::uint8_t* near(std::int64_t k, std::int64_t offset) const {
    return offset < stride_ ? now_[k] + offset : next_[k] + (offset - stride_);
  }
  // The same byte some steps further.
  const std::uint8_t* far(std::int64_t k, std::int64_t offset) const { return far_[k] + offset; }

 private:
  static constexpr std::int64_t kFar = 2048;              // bytes of each of the rows
  static constexpr std::int64_t kMostSteps = 16 / kStep;  // Tile pads its arrays by 16 tokens

  const std::uint8_t* const* rows_from(std::int64_t j) const { return j < count_ ? rows_ + j : after_ + (j - count_); }

  const std::uint8_t* const* rows_;
  const std::uint8_t* const* after_;
  std::int64_t count_, stride_, far_steps_;
  const std::uint8_t* const* now_ = nullptr;
  const std::uint8_t* const* next_ = nullptr;
  const std::uint8_t* const* far_ = nullptr;
};

// How far on in a row floating-point caches are fetched for the first-level cache. (All distances are measured.)
constexpr std::int64_t kNear = 1024;

// Where the keys of kDotKeys tokens lie, for kHeads KV heads that kShare rows from row `r` on belong to each, and what to
// fetch while they are read.
template <int kHeads, int kShare>
struct KeyRows {
  const std::uint8_t *now[kHeads][kDotKeys], *near[kHeads][kDotKeys], *far[kHeads][kDotKeys];

  inline __attribute__((always_inline)) KeyRows(const FewRows& few, std::int64_t r, const std::uint8_t* const* keys,
                                                const Ahead<kDotKeys>& ahead) {
#pragma GCC unroll 16
    for (int i = 0; i < kHeads * kDotKeys; ++i) {
      const int h = i / kDotKeys, k = i % kDotKeys;
      const std::int64_t head = few.key_head[r + h * kShare];
      now[h][k] = keys[k] + head;
      near[h][k] = ahead.near(k, head + kNear);
      far[h][k] = ahead.far(k, head);
    }
  }

  // What lies `offset` bytes into the keys of head `h`.
  inline __attribute__((always_inline)) void fetch(int h, std::int64_t offset) const {
#pragma GCC unroll 4
    for (int k = 0; k < kDotKeys; ++k) {
      __builtin_prefetch(far[h][k] + offset, 0, 2);
      __builtin_prefetch(near[h][k] + offset);
    }
  }
};

// Stores the scores of kRows rows, kDotKeys side by side in `lanes`.
template <int kRows>
inline void store_scores(F lanes, float* scores) {
  alignas(64) float each[Simd::W];
  Simd::store(each, lanes);
#pragma GCC unroll 4
  for (int s = 0; s < kRows; ++s) {
    std::memcpy(scores + s * FewRows::kScoreStride, each + s * kDotKeys, kDotKeys * sizeof(float));
  }
}

// Fetches rows from their start, a cache line a call.
class Lines {
 public:
  Lines(const std::uint8_t* const* rows, std::int64_t count, std::int64_t stride)
      : rows_(rows), count_(count), stride_(stride) {}

  void fetch() {
    if (row_ == count_) return;
    __builtin_prefetch(rows_[row_] + offset_);
    offset_ += 64;
    if (offset_ < stride_) return;
    offset_ = 0;
    ++row_;
  }

 private:
  const std::uint8_t* const* rows_;
  std::int64_t count_, stride_;
  std::int64_t row_ = 0, offset_ = 0;
};

// Cuts the rows of one KV head into chunks of at most kDotRows: calls body(first row, number of rows as a constant).
template <class Body>
inline void each_chunk(std::int64_t rows, Body body) {
  std::int64_t r = 0;
  for (; rows - r >= 4; r += 4) body(r, std::integral_constant<int, 4>());
  if (rows - r == 3) body(r, std::integral_constant<int, 3>());
  if (rows - r == 2) body(r, std::integral_constant<int, 2>());
  if (rows - r == 1) body(r, std::integral_constant<int, 1>());
}

// Calls body(first row, rows, share) for blocks of at most kDotRows rows, each `share` of which belong to one KV head: the
// heads' chunks, or chunks of several heads together where they are small.
template <class Body>
inline void each_block(const FewRows& few, Body body) {
  using Four = std::integral_constant<int, 4>;
  if (few.rows == 1) {
    for (std::int64_t r = 0; r < few.all; r += 4) body(r, Four(), std::integral_constant<int, 1>());
  } else if (few.rows == 2) {
    for (std::int64_t r = 0; r < few.all; r += 4) body(r, Four(), std::integral_constant<int, 2>());
  } else {
    for (std::int64_t head = 0; head < few.all; head += few.rows) {
      each_chunk(few.rows, [&](std::int64_t r, auto rows) { body(head + r, rows, rows); });
    }
  }
}

}  // namespace
}  // namespace pagegraft
