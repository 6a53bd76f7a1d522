// What the few-rows loops share: their working memory, the piece of positions in hand, and the fetching of the next.
namespace pagegraft {
namespace {

// Positions of one tile: about 64 KiB of keys, so that the tile and the next one, keys and values, stay in the
// second-level cache.
constexpr std::int64_t kFewTile = 128;

inline std::int64_t few_tile(const Step& step) {
  std::int64_t keys = kFewTile;
  while (keys > 16 && keys * step.kv.key.token_stride > 64 * 1024) keys /= 2;
  return keys;
}

struct FewRows {
  std::int64_t rows;      // per KV head
  std::int64_t all;       // rows * KV heads
  std::int64_t q_stride;  // floats
  std::int64_t v_stride;
  std::int64_t score_stride;
  std::int64_t state_stride;
  std::int64_t in_hand;  // floats from one buffer of scores and factors to the other
  std::int64_t heads_per_kv;
  float* query;       // [all][q_stride]
  float* sums;        // [all][v_stride]
  float* max;         // [KV heads][state_stride]
  float* total;       // [all][W], a part in each lane
  float* scores;      // [rows][score_stride], of the KV head in hand
  float* factors;     // [rows], likewise
  RowLimits* limits;  // [rows]

  // The same with the second buffer of scores and factors.
  FewRows other() const {
    FewRows few = *this;
    few.scores += in_hand;
    few.factors += in_hand;
    return few;
  }
};

// Which element of a stored row of n lies at index i of a query row or of a row of sums.
template <class S = Simd>
inline std::int64_t element_at(const Step& step, std::int64_t i, std::int64_t n) {
  if constexpr (S::kFours) {
    constexpr std::int64_t kFour = 4 * W;
    if (step.kv.key.type == Type::kInt4 && i < n / kFour * kFour) return i / kFour * kFour + S::four_int4(i % kFour);
  }
  return i;
}

// Brings a row of n floats into that order, or back out of it.
inline void arrange(const Step& step, std::int64_t n, float* row, bool back) {
  if (!Simd::kFours || step.kv.key.type != Type::kInt4) return;
  float four[4 * W];
  for (std::int64_t from = 0; from + 4 * W <= n; from += 4 * W) {
    std::memcpy(four, row + from, sizeof(four));
    for (std::int64_t i = 0; i < 4 * W; ++i) {
      const std::int64_t e = element_at(step, i, 4 * W);
      row[from + (back ? e : i)] = four[back ? i : e];
    }
  }
}

// Walks over rows of the next tile in the order of memory.
struct Cursor {
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

// Where to fetch from while one block is computed: a line from one stream, then from the other.
struct Ahead {
  const std::uint8_t* first;
  const std::uint8_t* second;

  template <std::int64_t kBytes>
  inline void fetch() {
    constexpr std::int64_t kLine = kBytes < 64 ? kBytes : 64;
#pragma GCC unroll 16
    for (std::int64_t i = 0; i < kBytes; i += kLine) {
      __builtin_prefetch(first, 0, 2);
      const std::uint8_t* next = first + kLine;
      first = second;
      second = next;
    }
  }
};

// Fetches the next tile, its keys and values side by side (halves of the keys where they are the values as well): the
// memory system serves two ascending streams faster than one.
class Fetcher {
 public:
  Fetcher(const Step& step, const std::uint8_t* const* keys, const std::uint8_t* const* values, std::int64_t count) {
    const std::int64_t k = step.kv.key.token_stride, v = step.kv.value.token_stride, half = count / 2;
    if (step.config.latent) {
      first_ = {keys, half, k, 0, 0};
      second_ = {keys + half, count - half, k, 0, 0};
    } else {
      first_ = {keys, count, k, 0, 0};
      second_ = {values, count, v, 0, 0};
      if (k != v) rate_ = 64 * (k > v ? k : v) / (k + v) + 1;  // the wider must be done in time
    }
  }

  // What to fetch while `bytes` of this tile are read.
  Ahead take(std::int64_t bytes) {
    const std::int64_t share = (bytes * rate_ + 63) / 64;
    return {first_.take(share), second_.take(share)};
  }

 private:
  Cursor first_, second_;
  std::int64_t rate_ = 32;  // bytes of each stream to bytes read, in 64ths
};

// One tile's positions within the unit's, for one KV head.
struct Piece {
  const Tile* tile;
  std::int64_t from, to;
  bool masked;  // some row does not see some position
};

}  // namespace
}  // namespace pagegraft
