// The digest of a box of a tensor: a weighted sum of its words that can be added over boxes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rvdcomm {

/// One dim of a strided box of words.
struct DigestDim {
  int64_t size;    ///< Indices of the box.
  int64_t stride;  ///< Words from one index to the next.
  int64_t lo;      ///< The first index of the box in the whole tensor.
};

/// The factor of index `i` of dim `d`: an odd pseudo-random number.
uint64_t digest_factor(uint64_t d, uint64_t i);

/// The sum, modulo 2**64, of (word + 1) times the factors of its indices, over all words of the
/// box. rvdcomm/arrival/digests.py has the definition.
/// @pre word_bytes is 1, 2 or 4; the words are aligned to it
/// @post the digests of boxes that tile a box add up to its digest
uint64_t digest(const void* data, size_t word_bytes, const DigestDim* dims, size_t num_dims);

}  // namespace rvdcomm
