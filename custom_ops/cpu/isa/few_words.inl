// Few query rows against int8 and int4 caches without making the codes floating-point, where Simd::kWords. Query rows and
// softmax weights are rounded to 16-bit words: a row in units of 2^-15 of its largest element, weights in units of 2^-15 of
// the largest of kWeightGroup; that is 256 times finer than int8 codes. Products and their sums are exact.
namespace pagegraft {
namespace {

// The size of a chunk, the unit in which stored rows are loaded: 32 words of codes, 2 or 4 to a word. Vector v of a chunk
// has code v of each word. Codes that are widened without their sign are kept in excess of theirs by `excess`.
constexpr std::int64_t kChunkWords = 32;
constexpr std::int64_t kChunkBytes = 64;

template <Type kType>
constexpr int kCodesPerWord = kType == Type::kInt4 ? 4 : 2;
template <Type kType>
constexpr std::int64_t kChunk = kChunkWords * kCodesPerWord<kType>;  // channels
template <Type kType>
constexpr std::int32_t excess(int v) {
  return kType == Type::kInt4 ? 8 : v == 0 ? 128 : 0;
}

template <Type kType>
constexpr bool kInWords = Simd::kWords && (kType == Type::kInt8 || kType == Type::kInt4);

// The element of a row that index i of its sums is for.
template <Type kType>
constexpr std::int64_t element_at(std::int64_t i) {
  if constexpr (!kInWords<kType>) return i;
  constexpr std::int64_t kPer = kCodesPerWord<kType>;
  const std::int64_t half = i / (16 * kPer) % 2, v = i / 16 % kPer, lane = i % 16;
  return i / kChunk<kType> * kChunk<kType> + (lane / 4 * 8 + half * 4 + lane % 4) * kPer + v;
}

template <Type kType>
struct ElementOrder {
  std::uint8_t of[kChunk<kType>];

  constexpr ElementOrder() : of() {
    for (std::int64_t i = 0; i < kChunk<kType>; ++i) of[i] = static_cast<std::uint8_t>(element_at<kType>(i));
  }
};

// Brings a row of n sums into the order of elements.
template <Type kType>
inline void order_elements(float* row, std::int64_t n) {
  if constexpr (kInWords<kType>) {
    static constexpr ElementOrder<kType> kOrder;
    float chunk[kChunk<kType>];
    for (std::int64_t from = 0; from < n; from += kChunk<kType>) {
      std::memcpy(chunk, row + from, sizeof(chunk));
      for (std::int64_t i = 0; i < kChunk<kType>; ++i) row[from + kOrder.of[i]] = chunk[i];
    }
  }
}

// Rounds a query row, padded with zeros to whole vectors; returns the unit, or NaN if some element is not finite. Words
// lie as a chunk's vectors do. `*surplus` gets what sums of products with stored codes exceed the right ones by.
template <Type kType, class S = Simd>
float query_to_words(const float* row, std::int64_t D, std::int64_t stride, std::int16_t* words,
                     std::int32_t* surplus) {
  constexpr int kPer = kCodesPerWord<kType>;
  F top = S::set1(1e-33f), finite = S::zero();  // smaller units would not be normal numbers
  for (std::int64_t i = 0; i < D; i += W) {
    const F x = S::load(row + i);
    top = S::max(top, S::max(x, S::sub(S::zero(), x)));
    finite = S::fma(x, S::zero(), finite);
  }
  std::memset(words, 0, static_cast<std::size_t>(stride) * sizeof(std::int16_t));
  *surplus = 0;
  if (!(S::reduce_add(finite) == 0.f)) return std::numeric_limits<float>::quiet_NaN();
  const float most = D <= 512 ? 32767.f : 32767.f * 512.f / static_cast<float>(D);  // D products must fit 32 bits
  const float largest = S::reduce_max(top);
  const F factor = S::set1(most / largest);
  for (std::int64_t i = 0; i < D; i += W) {
    std::int16_t* chunk = words + i / kChunk<kType> * kChunk<kType> + i % kChunk<kType> / kPer;
    S::template spread_words<kPer>(S::mul(S::load(row + i), factor), chunk, kChunkWords);
  }
  for (int v = 0; v < kPer && excess<kType>(v) != 0; ++v) {
    std::int32_t sum = 0;
    for (std::int64_t c = v * kChunkWords; c < stride; c += kChunk<kType>) {
      for (std::int64_t i = c; i < c + kChunkWords; ++i) sum += words[i];
    }
    *surplus += excess<kType>(v) * sum;
  }
  return largest / most;
}

template <Type kType>
void queries_to_words(const FewRows& few, std::int64_t D) {
  for (std::int64_t r = 0; r < few.padded_rows; ++r) {
    std::int32_t surplus;
    const float unit = query_to_words<kType>(few.query + r * few.q_stride, D, few.w_stride, few.words + r * few.w_stride,
                                             &surplus);
    for (std::int64_t k = 0; k < kDotKeys; ++k) {
      few.units[r * kDotKeys + k] = unit;
      few.surplus[r * kDotKeys + k] = surplus;
    }
  }
}

// As dot_block. kChunks is the number of chunks in a row, or 0 for any D: with a loop or a tail the compiler moves the sums
// between registers all the time.
template <Type kType, int kRows, int kShare, int kChunks, class S = Simd>
inline void dot_words_block(const FewRows& few, std::int64_t r, const std::uint8_t* const* keys,
                            const Ahead<kDotKeys>& ahead, std::int64_t D, float* scores) {
  using I = typename S::I;
  constexpr int kHeads = kRows / kShare;
  const std::int16_t* query = few.words + r * few.w_stride;
  I sums[S::W];
#pragma GCC unroll 16
  for (int i = 0; i < S::W; ++i) sums[i] = S::no_words();
  const KeyRows<kHeads, kShare> rows(few, r, keys, ahead);
  const auto step = [&](std::int64_t c, auto load) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      I chunk[kDotKeys];
      rows.fetch(h, c * kChunkBytes);
#pragma GCC unroll 4
      for (int k = 0; k < kDotKeys; ++k) chunk[k] = load(rows.now[h][k] + c * kChunkBytes);
      S::template each_vector<kCodesPerWord<kType>>([&](auto v) __attribute__((always_inline)) {
        I key[kDotKeys];
#pragma GCC unroll 4
        for (int k = 0; k < kDotKeys; ++k) key[k] = S::template widen<kCodesPerWord<kType>, v.value>(chunk[k]);
#pragma GCC unroll 4
        for (int s = h * kShare; s < (h + 1) * kShare; ++s) {
          const I q = S::load_words(query + s * few.w_stride + c * kChunk<kType> + v.value * kChunkWords);
#pragma GCC unroll 4
          for (int k = 0; k < kDotKeys; ++k) {
            sums[s * kDotKeys + k] = S::add_products(q, key[k], sums[s * kDotKeys + k]);
          }
        }
      });
    }
  };
  const auto whole = [](const std::uint8_t* p) { return S::load_chunk(p); };
  if constexpr (kChunks > 0) {
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) step(c, whole);
  } else {
    std::int64_t c = 0;
    for (; (c + 1) * kChunk<kType> <= D; ++c) step(c, whole);
    if (const std::int64_t left = D - c * kChunk<kType>; left > 0) {
      const std::int64_t bytes = stored_bytes<kType>(left + (kType == Type::kInt4));
      step(c, [&](const std::uint8_t* p) { return S::load_chunk(p, bytes); });
    }
  }
  const F exact = S::to_floats(S::subtract(S::reduce_each(sums), S::load_sums(few.surplus + r * kDotKeys)));
  store_scores<kRows>(S::mul(exact, S::load(few.units + r * kDotKeys)), scores);
}

// The scores of one row in floating-point, one by one.
template <Type kType>
void dot_strictly(const FewRows& few, std::int64_t r, const std::uint8_t* const* keys, std::int64_t count,
                  std::int64_t D) {
  for (std::int64_t j = 0; j < count; ++j) {
    float sum = 0.f;
    for (std::int64_t i = 0; i < D; ++i) {
      sum += few.query[r * few.q_stride + i] * stored_value(kType, keys[j] + few.key_head[r], i);
    }
    few.scores[r * FewRows::kScoreStride + j] = sum;
  }
}

// As dot_tile.
template <Type kType>
void dot_words_tile(const Step& step, const FewRows& few, const Piece& piece) {
  const std::int64_t D = step.sizes.D;
  const auto all = [&](auto chunks) {
    dot_tokens(step, piece, [&](std::int64_t j, const std::uint8_t* const* keys, const auto& ahead) {
      each_block(few, [&](std::int64_t r, auto rows, auto share) {
        dot_words_block<kType, rows.value, share.value, chunks.value>(few, r, keys, ahead, D,
                                                                      few.scores + r * FewRows::kScoreStride + j);
      });
    });
  };
  if (D == kChunk<kType>) {
    all(std::integral_constant<int, 1>());
  } else if (D == 2 * kChunk<kType>) {
    all(std::integral_constant<int, 2>());
  } else {
    all(std::integral_constant<int, 0>());
  }
  for (std::int64_t r = 0; r < few.all; ++r) {
    if (few.units[r * kDotKeys] == few.units[r * kDotKeys]) continue;
    dot_strictly<kType>(few, r, piece.tile->key + piece.from, piece.to - piece.from, D);
  }
}

}  // namespace
}  // namespace pagegraft
