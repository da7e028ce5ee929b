// The CRC32C by instructions of the processor equals that by tables, at all lengths and starts.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "rvdcomm/crc32c.h"

namespace {

using rvdcomm::crc32c;
using rvdcomm::crc32c_by_tables;

/// Bit by bit, as in the definition.
uint32_t defined(uint32_t value, const uint8_t* data, size_t num_bytes) {
  uint32_t sum = ~value;
  for (size_t i = 0; i < num_bytes; ++i) {
    sum ^= data[i];
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0x82F6'3B78U : 0U);
  }
  return ~sum;
}

std::vector<uint8_t> some_bytes(size_t num_bytes) {
  std::vector<uint8_t> bytes(num_bytes);
  uint32_t state = 1;
  for (uint8_t& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return bytes;
}

}  // namespace

int main() {
  CHECK(crc32c(0, "123456789", 9) == 0xE306'9283);
  CHECK(crc32c(7, nullptr, 0) == 7);
  const std::vector<uint8_t> bytes = some_bytes(100'003);
  // Around the ends of one and of three lanes, short and long.
  for (const size_t size : {0, 1, 7, 8, 9, 255, 767, 768, 769, 777, 1023, 1024, 1279, 1280, 24575,
                            24576, 24577, 25345}) {
    for (const size_t start : {0, 1, 5}) {
      const uint32_t expected = defined(5, bytes.data() + start, size);
      CHECK(crc32c(5, bytes.data() + start, size) == expected);
      CHECK(crc32c_by_tables(5, bytes.data() + start, size) == expected);
    }
  }
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (const size_t cut : {1, 1000, 50'001, 100'002}) {
    const uint32_t first = crc32c(0, bytes.data(), cut);
    CHECK(crc32c(first, bytes.data() + cut, bytes.size() - cut) == whole);
  }
  return 0;
}
