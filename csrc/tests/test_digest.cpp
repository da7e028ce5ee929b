// The digest of a strided box equals its definition, and those of boxes that tile it add up to it.
#include "rvdcomm/digest.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"

namespace {

using rvdcomm::digest;
using rvdcomm::digest_factor;
using rvdcomm::DigestDim;
using Dims = std::vector<DigestDim>;

/// Word by word, as in the definition.
template <typename Word>
uint64_t defined(const Word* words, const Dims& dims, size_t d = 0) {
  if (d == dims.size()) return uint64_t{*words} + 1;
  uint64_t sum = 0;
  for (int64_t i = 0; i < dims[d].size; ++i) {
    sum += digest_factor(d, static_cast<uint64_t>(dims[d].lo + i)) *
           defined(words + i * dims[d].stride, dims, d + 1);
  }
  return sum;
}

template <typename Word>
std::vector<Word> some_words(size_t size) {
  std::vector<Word> words(size);
  uint64_t state = 1;
  for (Word& word : words) {
    state = state * 6364136223846793005 + 1442695040888963407;
    word = static_cast<Word>(state >> 32);
  }
  return words;
}

template <typename Word>
uint64_t digest_of(const std::vector<Word>& words, const Dims& dims, int64_t offset = 0) {
  return digest(words.data() + offset, sizeof(Word), dims.data(), dims.size());
}

template <typename Word>
void check_boxes() {
  const std::vector<Word> words = some_words<Word>(40'000);
  const Dims boxes[] = {
      {},
      {{0, 1, 5}},
      {{1, 77, 9}},
      {{9'000, 1, 4'090}},                      // A run that is longer than the table.
      {{9'000, 4, 0}},                          // Not contiguous.
      {{30, 900, 2}, {300, 3, 1}, {3, 1, 0}},   // One run, partly in rows.
      {{2'000, 15, 1}, {3, 5, 4}, {5, 1, 0}},   // Short runs, joined in pieces.
      {{7, 2'000, 0}, {100, 2, 3}, {2, 1, 0}},  // Gaps between rows.
      {{50, 1, 6}, {60, 50, 8}},                // Transposed.
      {{5, 0, 0}, {70, 1, 0}},                  // Expanded.
      {{1, 12'345, 3}, {6, 20, 2}, {1, 3, 8}, {20, 1, 1}},
  };
  for (const Dims& dims : boxes) CHECK(digest_of(words, dims) == defined(words.data(), dims));
}

void check_tiles() {
  const auto words = some_words<uint32_t>(100 * 90);
  const uint64_t whole = digest_of(words, {{100, 90, 0}, {90, 1, 0}});
  for (const int64_t cut : {0, 1, 37, 100}) {
    const uint64_t first = digest_of(words, {{cut, 90, 0}, {90, 1, 0}});
    CHECK(first + digest_of(words, {{100 - cut, 90, cut}, {90, 1, 0}}, 90 * cut) == whole);
  }
  for (const int64_t cut : {0, 1, 37, 90}) {
    const uint64_t first = digest_of(words, {{100, 90, 0}, {cut, 1, 0}});
    CHECK(first + digest_of(words, {{100, 90, 0}, {90 - cut, 1, cut}}, cut) == whole);
  }
}

}  // namespace

int main() {
  check_boxes<uint8_t>();
  check_boxes<uint16_t>();
  check_boxes<uint32_t>();
  check_tiles();
  return 0;
}
