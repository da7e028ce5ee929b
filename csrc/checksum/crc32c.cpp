#include "rvdcomm/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace rvdcomm {
namespace {

constexpr uint32_t kPolynomial = 0x82F6'3B78;

// The instruction takes 3 cycles and starts every cycle, so three lanes are summed side by side. A
// shorter lane serves data that are shorter than three long ones.
constexpr size_t kLongLaneBytes = 8192;
constexpr size_t kShortLaneBytes = 256;

using Bytes = std::array<uint32_t, 256>;

/// Slices[k][b]: the register after byte b and k zero bytes.
struct Slices {
  std::array<Bytes, 8> after;
};

constexpr Slices make_slices() {
  Slices slices{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t word = b;
    for (int bit = 0; bit < 8; ++bit) word = (word >> 1) ^ ((word & 1) != 0 ? kPolynomial : 0);
    slices.after[0][b] = word;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      const uint32_t word = slices.after[k - 1][b];
      slices.after[k][b] = slices.after[0][word & 255] ^ (word >> 8);
    }
  }
  return slices;
}

constexpr Slices kSlices = make_slices();

/// What a number of zero bytes makes of a register, by byte of the register.
struct Zeros {
  std::array<Bytes, 4> of_byte;

  uint32_t operator()(uint32_t word) const {
    return of_byte[0][word & 255] ^ of_byte[1][(word >> 8) & 255] ^ of_byte[2][(word >> 16) & 255] ^
           of_byte[3][word >> 24];
  }
};

/// @pre num_bytes is a power of two.
Zeros make_zeros(size_t num_bytes) {
  Zeros zeros{};
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      const uint32_t word = b << (8 * k);
      zeros.of_byte[k][b] = kSlices.after[0][word & 255] ^ (word >> 8);
    }
  }
  for (; num_bytes > 1; num_bytes /= 2) {
    const Zeros half = zeros;
    for (Bytes& words : zeros.of_byte) {
      for (uint32_t& word : words) word = half(word);
    }
  }
  return zeros;
}

uint64_t word_at(const uint8_t* data) {
  uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#if defined(__x86_64__)
#define RVDCOMM_CRC_TARGET __attribute__((target("sse4.2")))
bool has_instructions() { return __builtin_cpu_supports("sse4.2") != 0; }
RVDCOMM_CRC_TARGET inline uint64_t step(uint64_t sum, uint64_t word) {
  return _mm_crc32_u64(sum, word);
}
RVDCOMM_CRC_TARGET inline uint32_t step_byte(uint32_t sum, uint8_t byte) {
  return _mm_crc32_u8(sum, byte);
}
#elif defined(__aarch64__)
#define RVDCOMM_CRC_TARGET __attribute__((target("+crc")))
bool has_instructions() { return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; }  // HWCAP_CRC32
RVDCOMM_CRC_TARGET inline uint64_t step(uint64_t sum, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(sum), word);
}
RVDCOMM_CRC_TARGET inline uint32_t step_byte(uint32_t sum, uint8_t byte) {
  return __crc32cb(sum, byte);
}
#endif

#if defined(RVDCOMM_CRC_TARGET)
/// Sums three lanes at a time from `data` on, which is advanced by the bytes that were summed.
template <size_t kLaneBytes>
RVDCOMM_CRC_TARGET uint64_t by_lanes(uint64_t sum, const uint8_t*& data, size_t& num_bytes) {
  static const Zeros after_lane = make_zeros(kLaneBytes);
  for (; num_bytes >= 3 * kLaneBytes; num_bytes -= 3 * kLaneBytes, data += 3 * kLaneBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kLaneBytes; i += 8) {
      sum = step(sum, word_at(data + i));
      second = step(second, word_at(data + kLaneBytes + i));
      third = step(third, word_at(data + 2 * kLaneBytes + i));
    }
    sum = after_lane(static_cast<uint32_t>(sum)) ^ second;
    sum = after_lane(static_cast<uint32_t>(sum)) ^ third;
  }
  return sum;
}

RVDCOMM_CRC_TARGET uint32_t by_instructions(uint32_t value, const uint8_t* data, size_t num_bytes) {
  uint64_t sum = ~value;
  sum = by_lanes<kLongLaneBytes>(sum, data, num_bytes);
  sum = by_lanes<kShortLaneBytes>(sum, data, num_bytes);
  for (; num_bytes >= 8; num_bytes -= 8, data += 8) sum = step(sum, word_at(data));
  uint32_t last = static_cast<uint32_t>(sum);
  for (; num_bytes > 0; --num_bytes, ++data) last = step_byte(last, *data);
  return ~last;
}
#endif

#if defined(__x86_64__)
constexpr size_t kWideBytes = 256;

/// x^exponent modulo the polynomial, as a factor of a carry-less product of reflected words.
uint64_t power(int exponent) {
  uint32_t word = uint32_t{1} << 31;  // x^0: the highest bit is the lowest power.
  for (int i = 0; i < exponent; ++i) word = (word >> 1) ^ ((word & 1) != 0 ? kPolynomial : 0);
  return uint64_t{word} << 1;
}

/// Folds 256 bytes at a time: the accumulators are 256 bytes whose CRC is that of all bytes so far.
/// Source: V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, 2009.
__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) uint32_t by_wide_products(uint32_t value,
                                                                               const uint8_t* data,
                                                                               size_t num_bytes) {
  if (num_bytes < 4 * kWideBytes) return by_instructions(value, data, num_bytes);
  static const uint64_t low_power = power(8 * kWideBytes + 32);
  static const uint64_t high_power = power(8 * kWideBytes - 32);
  const std::array<uint64_t, 8> powers = {low_power, high_power, low_power, high_power,
                                          low_power, high_power, low_power, high_power};
  const __m512i factors = _mm512_loadu_si512(powers.data());
  std::array<uint8_t, kWideBytes> last{};
  std::memcpy(last.data(), data, kWideBytes);
  for (size_t k = 0; k < 4; ++k) last[k] ^= static_cast<uint8_t>(~value >> (8 * k));
  __m512i sums[4];
  for (size_t k = 0; k < 4; ++k) sums[k] = _mm512_loadu_si512(last.data() + 64 * k);
  for (data += kWideBytes, num_bytes -= kWideBytes; num_bytes >= kWideBytes;
       data += kWideBytes, num_bytes -= kWideBytes) {
    for (size_t k = 0; k < 4; ++k) {
      const __m512i low = _mm512_clmulepi64_epi128(sums[k], factors, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(sums[k], factors, 0x11);
      const __m512i next = _mm512_loadu_si512(data + 64 * k);
      sums[k] = _mm512_ternarylogic_epi64(low, high, next, 0x96);  // The sum of all three.
    }
  }
  for (size_t k = 0; k < 4; ++k) _mm512_storeu_si512(last.data() + 64 * k, sums[k]);
  // From a register of 0, which is the value ~0.
  return by_instructions(by_instructions(~uint32_t{0}, last.data(), kWideBytes), data, num_bytes);
}

bool has_wide_products() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}
#endif

using Function = uint32_t (*)(uint32_t, const uint8_t*, size_t);

uint32_t by_tables(uint32_t value, const uint8_t* data, size_t num_bytes) {
  return crc32c_by_tables(value, data, num_bytes);
}

Function fastest() {
#if defined(__x86_64__)
  if (has_wide_products()) return by_wide_products;
#endif
#if defined(RVDCOMM_CRC_TARGET)
  if (has_instructions()) return by_instructions;
#endif
  return by_tables;
}

}  // namespace

uint32_t crc32c(uint32_t value, const void* data, size_t num_bytes) {
  static const Function function = fastest();
  return function(value, static_cast<const uint8_t*>(data), num_bytes);
}

uint32_t crc32c_by_tables(uint32_t value, const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t sum = ~value;
  for (; num_bytes >= 8; num_bytes -= 8, bytes += 8) {
    const uint64_t word = word_at(bytes) ^ sum;
    sum = 0;
    for (size_t k = 0; k < 8; ++k) sum ^= kSlices.after[7 - k][(word >> (8 * k)) & 255];
  }
  for (; num_bytes > 0; --num_bytes, ++bytes) {
    sum = kSlices.after[0][(sum ^ *bytes) & 255] ^ (sum >> 8);
  }
  return ~sum;
}

}  // namespace rvdcomm
