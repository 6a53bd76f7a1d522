// AArch64 Advanced SIMD: 4 lanes.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../work.h"

namespace pagegraft {
namespace {

struct Simd {
  using F = float32x4_t;
  static constexpr int W = 4;
  static constexpr const char* kName = "neon";
  static constexpr int kTileKeys = 8;
  static constexpr int kTileRows = 8;
  static constexpr int kWeighKeys = 4;      // keys of a few-rows PV step
  static constexpr bool kFours = false;
  static constexpr bool kWords = false;

  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static F set1(float x) { return vdupq_n_f32(x); }
  static F zero() { return vdupq_n_f32(0.f); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where either is NaN
  static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static F select_less(F a, F b, F x, F y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
  static F scale_by_power(F x, F magic) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(magic), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), n));
  }
  static float reduce_add(F x) { return vaddvq_f32(x); }
  static float reduce_max(F x) { return vmaxvq_f32(x); }

  static F load_float16(const std::uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p))));
  }
  static F load_bfloat16(const std::uint8_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)), 16));
  }
  static uint16x4_t four_bytes(const std::uint8_t* p) {
    std::uint32_t packed;
    __builtin_memcpy(&packed, p, 4);
    return vget_low_u16(vmovl_u8(vcreate_u8(packed)));
  }
  static F load_int8(const std::uint8_t* p) {
    std::uint32_t packed;
    __builtin_memcpy(&packed, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(vcreate_u8(packed))))));
  }
  static F load_float8(const std::uint8_t* p) {
    const uint32x4_t code = vmovl_u16(four_bytes(p));
    const uint32x4_t sign = vshlq_n_u32(vandq_u32(code, vdupq_n_u32(0x80)), 24);
    const uint32x4_t magnitude = vandq_u32(code, vdupq_n_u32(0x7f));
    const F x = vmulq_f32(vreinterpretq_f32_u32(vshlq_n_u32(magnitude, 20)), vdupq_n_f32(0x1p120f));
    const F signed_x = vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(x), sign));
    return vbslq_f32(vceqq_u32(magnitude, vdupq_n_u32(0x7f)), vdupq_n_f32(__builtin_nanf("")), signed_x);
  }
  static F load_int4(const std::uint8_t* p) {
    std::uint16_t packed;
    __builtin_memcpy(&packed, p, 2);
    const std::int32_t codes[4] = {packed & 15, (packed >> 4) & 15, (packed >> 8) & 15, packed >> 12};
    return vcvtq_f32_s32(vsubq_s32(vld1q_s32(codes), vdupq_n_s32(8)));
  }

  static F reduce_each(const F* a) { return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])); }
};

}  // namespace
}  // namespace pagegraft

#include "generic.inl"

namespace pagegraft {
const Isa* neon_isa() { return &kIsa; }
}  // namespace pagegraft
#else
#include "../work.h"
namespace pagegraft {
const Isa* neon_isa() { return nullptr; }
}  // namespace pagegraft
#endif
