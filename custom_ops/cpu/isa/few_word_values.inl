// Few query rows: weighted sums of int8 and int4 values, see few_words.inl.
namespace pagegraft {
namespace {

// Rounds the weights of a piece. Returns false, leaving nothing of use, if some weight is not finite.
template <class S = Simd>
bool weights_to_words(const FewRows& few, std::int64_t count) {
  static_assert(kWeightGroup == S::W && 2 * kWeightGroups == S::W, "the groups of two rows fill the lanes of a vector");
  for (std::int64_t r = 0; r < few.all; r += 2) {
    F groups[S::W], finite = S::zero();
#pragma GCC unroll 16
    for (int i = 0; i < S::W; ++i) {
      const std::int64_t row = r + i / kWeightGroups, j = i % kWeightGroups * kWeightGroup;
      groups[i] = row < few.all && j < count ? S::load(few.scores + row * FewRows::kScoreStride + j) : S::zero();
      finite = S::fma(groups[i], S::zero(), finite);
    }
    if (!(S::reduce_add(finite) == 0.f)) return false;
    const F top = S::max(S::set1(1e-33f), S::largest_of_each(groups));  // smaller units would not be normal numbers
    alignas(64) float factors[S::W];
    S::store(factors, S::div(S::set1(32767.f), top));
    S::store(few.weight_units + r * kWeightGroups, S::mul(top, S::set1(1.f / 32767.f)));
    typename S::I sums[S::W];
#pragma GCC unroll 16
    for (int i = 0; i < S::W; ++i) {
      sums[i] = S::to_integers(S::mul(groups[i], S::set1(factors[i])));
      const std::int64_t row = r + i / kWeightGroups, j = i % kWeightGroups * kWeightGroup;
      S::store_as_words(few.weight_words + row * kFewTile + j, sums[i]);
    }
    S::store_sums(few.weight_sums + r * kWeightGroups, S::reduce_each(sums));
  }
  return true;
}

// sums += weights . values for kShare rows of one KV head from row `r` on, group `g` of positions and a block of four
// vectors of channels: both halves of a chunk of int8, half `kHalf` of one of int4 (the halves that interleaving the words
// of two tokens gives).
template <Type kType, int kShare, int kHalf, class S = Simd, class Load>
inline void weigh_words_block(const FewRows& few, std::int64_t r, std::int64_t g, float* sums, Load load) {
  using I = typename S::I;
  constexpr int kPer = kCodesPerWord<kType>, kVectors = 4;
  const std::int64_t at = r * kWeightGroups + g;
  I acc[kShare][kVectors];
#pragma GCC unroll 4
  for (int s = 0; s < kShare; ++s) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const std::int32_t over = excess<kType>(v % kPer);
      acc[s][v] = over == 0 ? S::no_words() : S::same_sums(-over * few.weight_sums[at + s * kWeightGroups]);
    }
  }
  const std::int16_t* words = few.weight_words + r * kFewTile + g * kWeightGroup;
#pragma GCC unroll 8
  for (int j = 0; j < kWeightGroup; j += 2) {
    const I first = load(j), second = load(j + 1);
    I value[kVectors];
    S::template each_vector<kVectors>([&](auto v) __attribute__((always_inline)) {
      constexpr int kOf = kPer == 4 ? kHalf : v.value / 2;
      value[v.value] = S::template widen<kPer, v.value % kPer>(S::template interleave<kOf>(first, second));
    });
#pragma GCC unroll 4
    for (int s = 0; s < kShare; ++s) {
      const I pair = S::same_pair(words + s * kFewTile + j);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[s][v] = S::add_products(pair, value[v], acc[s][v]);
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < kShare; ++s) {
    const F unit = S::set1(few.weight_units[at + s * kWeightGroups]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* sum = sums + s * few.v_stride + v * S::W;
      S::store(sum, S::fma(S::to_floats(acc[s][v]), unit, S::load(sum)));
    }
  }
}

// A chunk of channels from byte `from` of the rows on, as weigh_words_block. Fetches the same of the `next` rows, and for
// the first-level cache what is read soon.
template <Type kType, int kShare, class S = Simd>
inline void weigh_words_chunk(const FewRows& few, std::int64_t r, std::int64_t g, const std::uint8_t* const* rows,
                              const std::uint8_t* const* next, std::int64_t from, std::int64_t bytes, float* sums) {
  constexpr std::int64_t kSoon = 256;
  const auto whole = [&](int j) { return S::load_chunk(rows[j] + from); };
  const auto part = [&](int j) { return S::load_chunk(rows[j] + from, bytes); };
  const auto fetching = [&](int j) {
    __builtin_prefetch(next[j] + from, 0, 2);
    __builtin_prefetch(rows[j] + from + kSoon);
    return whole(j);
  };
  if (bytes >= kChunkBytes) {
    weigh_words_block<kType, kShare, 0>(few, r, g, sums, fetching);
    if constexpr (kType == Type::kInt4) weigh_words_block<kType, kShare, 1>(few, r, g, sums + 4 * S::W, whole);
  } else {
    weigh_words_block<kType, kShare, 0>(few, r, g, sums, part);
    if constexpr (kType == Type::kInt4) weigh_words_block<kType, kShare, 1>(few, r, g, sums + 4 * S::W, part);
  }
}

// As weigh_tile.
template <Type kType>
void weigh_words_tile(const Step& step, const FewRows& few, const Piece& piece) {
  const std::int64_t width = stored_bytes<kType>(step.sizes.Dv + (kType == Type::kInt4));
  const std::int64_t groups = (piece.to - piece.from + kWeightGroup - 1) / kWeightGroup;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::uint8_t* const* rows = piece.tile->value + piece.from + g * kWeightGroup;
    const std::uint8_t* const* next = g + 1 < groups ? rows + kWeightGroup : piece.tile->key + piece.to;
    for (std::int64_t head = 0; head < few.all; head += few.rows) {
      each_chunk(few.rows, [&](std::int64_t r, auto share) {
        float* sums = few.sums + (head + r) * few.v_stride;
        for (std::int64_t byte = 0; byte < width; byte += kChunkBytes, sums += kChunk<kType>) {
          weigh_words_chunk<kType, share.value>(few, head + r, g, rows, next, few.value_head[head] + byte, width - byte,
                                                sums);
        }
      });
    }
  }
}

}  // namespace
}  // namespace pagegraft
