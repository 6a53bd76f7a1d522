// AVX2 with FMA and F16C: 8 lanes.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "../work.h"

namespace pagegraft {
namespace {

struct Simd {
  using F = __m256;
  static constexpr int W = 8;
  static constexpr const char* kName = "avx2";
  static constexpr int kTileKeys = 6;
  static constexpr int kTileRows = 4;
  static constexpr int kWeighKeys = 2;      // keys of a few-rows PV step
  static constexpr bool kFours = false;
  static constexpr bool kWords = false;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F zero() { return _mm256_setzero_ps(); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F select_less(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static F scale_by_power(F x, F magic) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(magic), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n));
  }
  static F permute(F x, const std::int32_t* lanes) {
    return _mm256_permutevar8x32_ps(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
  }
  static float reduce_add(F x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  static float reduce_max(F x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
  }

  static F load_float16(const std::uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_bfloat16(const std::uint8_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load_int8(const std::uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_float8(const std::uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0x8000)));
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const F x = _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7))), _mm256_set1_ps(256.f));
    const __m256i nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(__builtin_nanf("")), _mm256_castsi256_ps(nan));
  }
  static F load_int4(const std::uint8_t* p) {
    std::uint32_t packed;
    __builtin_memcpy(&packed, p, 4);
    const __m128i bytes = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(static_cast<int>(packed)));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi16(0x0f));
    const __m128i high = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0xf0)), 4);
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_or_si128(low, high));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
  }

  // The sums of 8 vectors as one vector.
  static F reduce_each(const F* a) {
    const F b0 = _mm256_hadd_ps(a[0], a[1]), b1 = _mm256_hadd_ps(a[2], a[3]);
    const F b2 = _mm256_hadd_ps(a[4], a[5]), b3 = _mm256_hadd_ps(a[6], a[7]);
    const F c0 = _mm256_hadd_ps(b0, b1), c1 = _mm256_hadd_ps(b2, b3);
    return _mm256_add_ps(_mm256_permute2f128_ps(c0, c1, 0x20), _mm256_permute2f128_ps(c0, c1, 0x31));
  }
};

}  // namespace
}  // namespace pagegraft

#include "generic.inl"

namespace pagegraft {
const Isa* avx2_isa() { return &kIsa; }
}  // namespace pagegraft
#else
#include "../work.h"
namespace pagegraft {
const Isa* avx2_isa() { return nullptr; }
}  // namespace pagegraft
#endif
