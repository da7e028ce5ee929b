// Conversions between float32 and floats of 8 and 16 bits. NaN stays NaN; values are rounded to the
// nearest, ties to even (Float8E8M0 has a rule of its own).
#pragma once

#include <cstdint>
#include <cstring>

#include "rvdcomm/macros.h"

namespace rvdcomm {

/// The bits of `from` read as another type of the same size.
template <typename To, typename From>
RVD_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

/// How a format represents infinity and NaN.
enum class Top {
  kInfinity,   // as IEEE: the largest exponent encodes infinity and NaN
  kOneNaN,     // "fn": all ones is NaN, no infinity; overflow gives the largest value, as in torch
  kMinusZero,  // "fnuz": the pattern of -0 is NaN; no infinity, no -0
};

/// A small float of 1 sign bit, `kExp` exponent bits and `kMan` mantissa bits.
template <int kExp, int kMan, int kBias, Top kTop>
struct SmallFloat {
  static constexpr int kShift = 23 - kMan;
  static constexpr uint32_t kSign = 1u << (kExp + kMan);
  static constexpr uint32_t kAllOnes = kSign - 1;
  static constexpr uint32_t kInf = kAllOnes & ~((1u << kMan) - 1);
  static constexpr uint32_t kNaN = kTop == Top::kInfinity ? kInf | (1u << (kMan - 1))
                                   : kTop == Top::kOneNaN ? kAllOnes
                                                          : kSign;
  static constexpr uint32_t kMax = kTop == Top::kInfinity ? kInf - 1
                                   : kTop == Top::kOneNaN ? kAllOnes - 1
                                                          : kAllOnes;
  static constexpr uint32_t kOverflow = kTop == Top::kInfinity ? kInf
                                        : kTop == Top::kOneNaN ? kMax
                                                               : kNaN;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  // float32 bits of the smallest positive value, 2^(1 - bias - man), and the smallest normal value.
  static constexpr uint32_t kTinyBits = static_cast<uint32_t>(127 + 1 - kBias - kMan) << 23;
  static constexpr uint32_t kNormalBits = static_cast<uint32_t>(127 + 1 - kBias) << 23;
  // float32 bits of a power of two whose unit in the last place is the smallest positive value.
  static constexpr uint32_t kMagicBits = kTinyBits + (23u << 23);

  /// The exact float32 value of a bit pattern.
  /// @post bits_from_float(float_from_bits(b)) == b unless b is a NaN
  static RVD_HD float float_from_bits(uint32_t bits) {
    const uint32_t magnitude = bits & kAllOnes, sign = (bits & kSign) << (31 - kExp - kMan);
    const float tiny =
        static_cast<float>(static_cast<int32_t>(magnitude)) * bit_cast<float>(kTinyBits);
    uint32_t result =
        magnitude < (1u << kMan) ? bit_cast<uint32_t>(tiny) : (magnitude << kShift) + kRebias;
    if (kTop == Top::kInfinity) {
      result = magnitude >= kInf ? (magnitude << kShift) | 0x7f800000u : result;
    } else if (kTop == Top::kOneNaN) {
      result = magnitude == kNaN ? 0x7fc00000u : result;
    } else {
      result = bits == kNaN ? 0x7fc00000u : result;
    }
    return bit_cast<float>(result | sign);
  }

  /// The bits of the nearest value, ties to even. Overflow gives infinity (kInfinity), the largest
  /// value (kOneNaN) or NaN (kMinusZero).
  static RVD_HD uint32_t bits_from_float(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    // The float addition of the magic number rounds a value below the normal range.
    const float shifted = bit_cast<float>(magnitude) + bit_cast<float>(kMagicBits);
    const uint32_t below = bit_cast<uint32_t>(shifted) - kMagicBits;
    const uint32_t odd = (magnitude >> kShift) & 1u;
    const uint32_t above = (magnitude - kRebias + ((1u << (kShift - 1)) - 1u) + odd) >> kShift;
    uint32_t result = magnitude < kNormalBits ? below : above;
    const bool is_large = magnitude >= kNormalBits && above > kMax;
    result = is_large ? kOverflow : result;
    result = magnitude > 0x7f800000u ? kNaN : result;
    const uint32_t sign = (bits >> (31 - kExp - kMan)) & kSign;
    if (kTop == Top::kMinusZero) return result == 0 || result == kNaN ? result : result | sign;
    return result | sign;
  }
};

using SoftFloat16 = SmallFloat<5, 10, 15, Top::kInfinity>;
using Float8E5M2 = SmallFloat<5, 2, 15, Top::kInfinity>;
using Float8E4M3 = SmallFloat<4, 3, 7, Top::kOneNaN>;
using Float8E5M2Fnuz = SmallFloat<5, 2, 16, Top::kMinusZero>;
using Float8E4M3Fnuz = SmallFloat<4, 3, 8, Top::kMinusZero>;

/// IEEE half. A GPU converts it in one instruction, with the same result except for bits of NaNs.
struct Float16 : SoftFloat16 {
#if defined(__CUDA_ARCH__)
  static RVD_HD float float_from_bits(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
  }

  static RVD_HD uint32_t bits_from_float(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    const uint32_t sign = bit_cast<uint32_t>(value) >> 16 & kSign;
    return value == value ? bits : kNaN | sign;
  }
#endif
};

/// The upper half of a float32.
struct BFloat16 {
  static RVD_HD float float_from_bits(uint32_t bits) { return bit_cast<float>(bits << 16); }

  static RVD_HD uint32_t bits_from_float(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint16_t nearest;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(nearest) : "f"(value));
    return value == value ? nearest : (bits >> 16) | 0x40u;
#else
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
#endif
  }
};

/// A power of two: 8 exponent bits, no sign, no zero; all ones is NaN.
struct Float8E8M0 {
  static RVD_HD float float_from_bits(uint32_t bits) {
    const uint32_t normal = bits == 0xffu ? 0x7fc00000u : bits << 23;
    return bit_cast<float>(bits == 0 ? 0x00400000u : normal);
  }

  /// Round the magnitude as torch does: to the nearest power of two, ties upwards. Magnitudes below
  /// 2^-126 give 2^-126 if they are above 2^-127, else 2^-127.
  static RVD_HD uint32_t bits_from_float(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value) & 0x7fffffffu;
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    const bool is_up = mantissa > 0x400000u || (mantissa == 0x400000u && exponent > 0);
    return exponent == 0xffu ? 0xffu : exponent + (is_up ? 1u : 0u);
  }
};

}  // namespace rvdcomm
