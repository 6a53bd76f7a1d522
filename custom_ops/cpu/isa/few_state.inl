// What the few-rows loops share: their working memory, the piece of positions in hand, and the fetching of the next.
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

// One tile's positions within the unit's, for one KV head.
struct Piece {
  const Tile* tile;
  std::int64_t from, to;
  bool masked;  // some row does not see some position
};

}  // namespace
}  // namespace pagegraft
