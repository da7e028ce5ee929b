#include "rvdcomm/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
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

}  // namespace

uint32_t crc32c(uint32_t value, const void* data, size_t num_bytes) {
#if defined(RVDCOMM_CRC_TARGET)
  static const bool is_fast = has_instructions();
  if (is_fast) return by_instructions(value, static_cast<const uint8_t*>(data), num_bytes);
#endif
  return crc32c_by_tables(value, data, num_bytes);
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
