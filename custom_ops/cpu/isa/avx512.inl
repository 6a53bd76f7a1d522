// AVX-512 (F, BW, DQ, VL) with F16C: 16 lanes; with VBMI and VNNI, where the including file is compiled for them.
#include <immintrin.h>

#include "../work.h"

namespace pagegraft {
namespace {

#ifdef __AVX512VBMI__
// The bytes of the bfloat16 that equals each float8 code without its sign, and the order in which 64 codes go through
// the unpacking: from every dword the even words end up in one vector and the odd ones in the next.
struct Float8Tables {
  alignas(64) std::uint8_t low[128] = {}, high[128] = {}, order[64] = {};

  constexpr Float8Tables() {
    for (int code = 0; code < 128; ++code) {
      int bits = ((code >> 3) + 120) << 7 | (code & 7) << 4;
      if (code < 8) {  // subnormal: code * 2^-9
        int top = 0;
        while (code >> top > 1) ++top;
        bits = code == 0 ? 0 : (top + 118) << 7 | ((code << (7 - top)) & 0x7f);
      }
      if (code == 127) bits = 0x7fc0;
      low[code] = static_cast<std::uint8_t>(bits & 0xff);
      high[code] = static_cast<std::uint8_t>(bits >> 8);
    }
    for (int i = 0; i < 64; ++i) {
      order[i] = static_cast<std::uint8_t>(i % 16 / 8 * 32 + i % 2 * 16 + i / 16 * 4 + i % 8 / 2);
    }
  }
};
#endif

struct Simd {
  using F = __m512;
  static constexpr int W = 16;
#ifdef __AVX512VBMI__
  static constexpr const char* kName = "avx512vbmi";
#else
  static constexpr const char* kName = "avx512";
#endif
  static constexpr int kTileKeys = 8;      // keys of a QK^T microtile (by 2 vectors of rows)
  static constexpr int kTileRows = 8;      // rows of a PV microtile (by 2 vectors of channels)
  static constexpr int kWeighKeys = 4;      // keys of a few-rows PV step
  static constexpr bool kFours = true;     // has loads of four vectors at once
  static constexpr bool kWords = true;     // has the 16-bit arithmetic of few_words.inl

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F zero() { return _mm512_setzero_ps(); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  // a < b ? x : y
  static F select_less(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }
  // 2^n for integral n whose bits were left in the mantissa by adding 1.5 * 2^23
  static F scale_by_power(F x, F magic) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(magic), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n));
  }
  static F permute(F x, const std::int32_t* lanes) { return _mm512_permutexvar_ps(_mm512_loadu_si512(lanes), x); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

  static F load_float16(const std::uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bfloat16(const std::uint8_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F load_int8(const std::uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // Through float16: a shift moves exponent and mantissa in place, 2^8 corrects the bias. Code 0x7f is NaN: adding 1
  // carries into bit 7 for it alone, which completes the exponent.
  static F load_float8(const std::uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i nan = _mm256_and_si256(_mm256_add_epi16(magnitude, _mm256_set1_epi16(1)), _mm256_set1_epi16(0x80));
    const __m256i shifted = _mm256_slli_epi16(_mm256_or_si256(magnitude, nan), 7);
    // sign bit of `wide`, everything else of `shifted`
    const __m256i half = _mm256_ternarylogic_epi32(wide, shifted, _mm256_set1_epi16(static_cast<short>(0x8000)), 0xe4);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.f));
  }
  // Nibble i moves to the low bits of lane i, which is all that a permutation of a table of 16 looks at.
  static F load_int4(const std::uint8_t* p) {
    const __m512i words = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m512i spread = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), words);
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const F table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(spread, shifts), table);
  }

  static void load_four_float8(const std::uint8_t* p, F* out) {
#ifdef __AVX512VBMI__
    static constexpr Float8Tables kTables;
    const auto table = [](const std::uint8_t* bytes) { return _mm512_load_si512(bytes); };
    const __m512i codes = _mm512_permutexvar_epi8(table(kTables.order), _mm512_loadu_si512(p));
    const __m512i low = _mm512_permutex2var_epi8(table(kTables.low), codes, table(kTables.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(table(kTables.high), codes, table(kTables.high + 64));
    const __m512i both = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    const __m512i words[2] = {_mm512_unpacklo_epi8(low, both), _mm512_unpackhi_epi8(low, both)};
    for (int i = 0; i < 2; ++i) {
      out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(words[i], 16));
      out[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(words[i], _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
#else
    for (int i = 0; i < 4; ++i) out[i] = load_float8(p + i * W);
#endif
  }
  // 32 words of 16 bits, or 16 sums of their products.
  using I = __m512i;
  static I no_words() { return _mm512_setzero_si512(); }
  static I load_words(const std::int16_t* p) { return _mm512_loadu_si512(p); }
  static I load_sums(const std::int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_sums(std::int32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static I same_sums(std::int32_t x) { return _mm512_set1_epi32(x); }
  static I same_pair(const std::int16_t* p) {
    std::int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static F to_floats(I sums) { return _mm512_cvtepi32_ps(sums); }
  static I to_integers(F x) { return _mm512_cvtps_epi32(x); }
  static I subtract(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I add_products(I a, I b, I sum) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
  }
  static void store_as_words(std::int16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  // Every kStep-th of 16 numbers to p, those after them to p + stride, and so on.
  template <int kStep>
  static void spread_words(F x, std::int16_t* p, std::int64_t stride) {
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x));
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) {
      if constexpr (kStep == 2) {
        const __m128i each = _mm256_cvtepi32_epi16(_mm256_srli_epi32(words, 16 * i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * stride), each);
      } else {
        const __m128i each = _mm256_cvtepi64_epi16(_mm256_srli_epi64(words, 16 * i));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p + i * stride), each);
      }
    }
  }
  static I load_chunk(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
  static I load_chunk(const std::uint8_t* p, std::int64_t bytes) {
    return _mm512_maskz_loadu_epi8(~std::uint64_t{0} >> (64 - bytes), p);
  }
  // Words of two rows in turn: of the lower or the upper half of each 128 bits.
  template <int kHalf>
  static I interleave(I a, I b) {
    return kHalf == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b);
  }
  // Code `kWhich` of each word: an int4 code with 8 added, an even int8 code with 128 added, an odd one as it is.
  template <int kCodes, int kWhich>
  static I widen(I words) {
    if constexpr (kCodes == 2) {
      if constexpr (kWhich == 1) return _mm512_srai_epi16(words, 8);
      return _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(0x80), _mm512_set1_epi16(0xff), 0x28);  // (a ^ b) & c
    } else {
      const I low = kWhich == 0 ? words : _mm512_srli_epi16(words, 4 * kWhich);
      return kWhich == 3 ? low : _mm512_and_si512(low, _mm512_set1_epi16(15));
    }
  }
  // Calls body(v) for v in [0, kCount) as compile-time constants.
  template <int kCount, class Body>
  static inline __attribute__((always_inline)) void each_vector(Body body) {
    body(std::integral_constant<int, 0>());
    body(std::integral_constant<int, 1>());
    if constexpr (kCount == 4) {
      body(std::integral_constant<int, 2>());
      body(std::integral_constant<int, 3>());
    }
  }

  // The sums of 16 vectors as one vector, and their largest absolute elements.
  static F reduce_each(const F* a) {
    return reduce_each(a, [](F x, F y) { return _mm512_add_ps(x, y); }, [](F x) { return x; });
  }
  static inline __attribute__((always_inline)) I reduce_each(const I* a) {
    const auto add = [](F x, F y) {
      return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
    };
    return _mm512_castps_si512(reduce_each(a, add, [](I x) { return _mm512_castsi512_ps(x); }));
  }
  static F largest_of_each(const F* a) {
    return reduce_each(a, [](F x, F y) { return _mm512_max_ps(x, y); }, [](F x) { return _mm512_abs_ps(x); });
  }

 private:
  template <class V, class Join, class Cast>
  static inline __attribute__((always_inline)) F reduce_each(const V* vectors, Join join, Cast cast) {
    F b[8], c[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const F x = cast(vectors[2 * i]), y = cast(vectors[2 * i + 1]);
      b[i] = join(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d lo = _mm512_castps_pd(b[2 * i]), hi = _mm512_castps_pd(b[2 * i + 1]);
      c[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi)), _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
    }
    // c[i] holds, in each 128-bit lane, partial results of vectors 4i .. 4i+3.
    const F d0 = join(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    const F d1 = join(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
    return join(_mm512_shuffle_f32x4(d0, d1, 0x88), _mm512_shuffle_f32x4(d0, d1, 0xdd));
  }
};

}  // namespace
}  // namespace pagegraft

#include "generic.inl"
