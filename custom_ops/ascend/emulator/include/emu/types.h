// half and bfloat16_t with round-to-nearest-even conversions, range-checked integer parameters, dtype sets.
#pragma once
#include <cmath>
#include <type_traits>

#include "machine.h"

namespace emu {

inline uint32_t BitsOf(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline float FromBits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// IEEE binary16 from binary32, nearest even; overflow becomes infinity.
inline uint16_t HalfBits(float value) {
    const uint32_t bits = BitsOf(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) { return static_cast<uint16_t>(sign | 0x7E00u); }
    if (magnitude >= 0x47800000u) { return static_cast<uint16_t>(sign | 0x7C00u); }  // 2^16 and more
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 aligns the bits and rounds
        const float aligned = FromBits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (BitsOf(aligned) - 0x3F000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + odd) >> 13));
}

inline float HalfValueSlow(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1Fu, mantissa = bits & 0x3FFu;
    if (exponent == 31) { return FromBits(sign | 0x7F800000u | (mantissa << 13)); }
    if (exponent == 0) {
        const float value = static_cast<float>(mantissa) * FromBits(0x33800000u);  // mantissa * 2^-24
        return sign != 0 ? -value : value;
    }
    return FromBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline float HalfValue(uint16_t bits) {
    static const std::vector<float>& table = *[] {
        auto* values = new std::vector<float>(65536);
        for (uint32_t i = 0; i < 65536; ++i) { (*values)[i] = HalfValueSlow(static_cast<uint16_t>(i)); }
        return values;
    }();
    return table[bits];
}

inline uint16_t BfloatBits(float value) {
    const uint32_t bits = BitsOf(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) { return static_cast<uint16_t>((bits >> 16) | 0x40u); }
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace emu

// Named as the device compiler names them.
struct half {
    half() = default;
    explicit half(float value) : bits(emu::HalfBits(value)) {}
    explicit operator float() const { return emu::HalfValue(bits); }
    uint16_t bits;
};

// On the device bfloat16_t has no arithmetic: it must be cast by a vector instruction.
struct bfloat16_t {
    uint16_t bits;
};

namespace emu {

template <typename T>
inline float Widen(T value) {
    if constexpr (std::is_same_v<T, half>) {
        return HalfValue(value.bits);
    } else if constexpr (std::is_same_v<T, bfloat16_t>) {
        return FromBits(static_cast<uint32_t>(value.bits) << 16);
    } else {
        return static_cast<float>(value);
    }
}

template <typename T>
inline T Narrow(float value) {
    if constexpr (std::is_same_v<T, half>) {
        half result;
        result.bits = HalfBits(value);
        return result;
    } else if constexpr (std::is_same_v<T, bfloat16_t>) {
        return bfloat16_t{BfloatBits(value)};
    } else {
        return static_cast<T>(value);
    }
}

template <typename T, typename... Set>
constexpr bool OneOf = (std::is_same_v<T, Set> || ...);

// An integer parameter whose device field is narrower than what callers compute: out of range is an error here, where
// the device would silently wrap.
template <typename Field, int64_t kMax = static_cast<int64_t>(static_cast<Field>(-1))>
class Checked {
public:
    template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
    constexpr Checked(I value) : value_(static_cast<Field>(value)) {
        if (static_cast<int64_t>(value) < 0 || static_cast<int64_t>(value) > kMax) {
            Fail("field-range", "parameter %lld does not fit its field (0..%lld)", static_cast<long long>(value),
                 static_cast<long long>(kMax));
        }
    }
    constexpr operator Field() const { return value_; }

private:
    Field value_;
};

using U8 = Checked<uint8_t>;
using U16 = Checked<uint16_t>;
using Count12 = Checked<uint16_t, 4095>;

}  // namespace emu
