// CRC32C (polynomial 0x1EDC6F41, reflected), the checksum of the blocks of a checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rvdcomm {

/// The CRC32C of `num_bytes` bytes that follow those whose CRC32C is `value`, by the instructions
/// of the processor where it has them (AVX-512 with VPCLMULQDQ, SSE4.2, ARMv8 CRC), else by tables.
/// @post crc32c(crc32c(0, a), b) == crc32c(0, a + b)
uint32_t crc32c(uint32_t value, const void* data, size_t num_bytes);

/// The same by tables.
uint32_t crc32c_by_tables(uint32_t value, const void* data, size_t num_bytes);

}  // namespace rvdcomm
