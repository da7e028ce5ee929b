// The index maps of a box agree with each other, and FastDiv gives exact quotients.
#include <initializer_list>

#include "check.h"
#include "rvdcomm/fast_div.h"
#include "rvdcomm/strided_box.h"

using namespace rvdcomm;

namespace {

void offset_from_flat_walks_the_box_in_row_major_order() {
  const StridedBox box{3, {2, 3, 5}, 7, {100, -11, 2}};
  int64_t flat = 0;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 3; ++j) {
      for (int64_t k = 0; k < 5; ++k, ++flat) {
        const int64_t coord[] = {i, j, k};
        CHECK(flat_from_coord(box, coord) == flat);
        CHECK(offset_from_coord(box, coord) == 7 + 100 * i - 11 * j + 2 * k);
        CHECK(offset_from_flat(box, flat) == offset_from_coord(box, coord));
      }
    }
  }
  CHECK(num_elements(box) == flat);
}

void a_box_without_dims_has_one_element() {
  const StridedBox box{0, {}, 9, {}};
  CHECK(num_elements(box) == 1);
  CHECK(offset_from_flat(box, 0) == 9);
}

void offsets_are_64_bits_wide() {
  const StridedBox box{1, {1 << 20}, 0, {int64_t{1} << 40}};
  CHECK(offset_from_flat(box, (1 << 20) - 1) == ((int64_t{1} << 20) - 1) << 40);
}

void quotient_is_a_division(uint32_t divisor) {
  const FastDiv by = fast_div(divisor);
  const uint32_t top = 0x7fffffffu, multiple = top / divisor * divisor;
  for (const uint32_t number : {0u, 1u, divisor - 1, divisor, multiple - 1, multiple, top}) {
    CHECK(quotient(number, by) == number / divisor);
  }
  for (uint32_t number = 0; number < 0x7f000000u; number += 16777259u / 7) {
    CHECK(quotient(number, by) == number / divisor);
  }
}

}  // namespace

int main() {
  offset_from_flat_walks_the_box_in_row_major_order();
  a_box_without_dims_has_one_element();
  offsets_are_64_bits_wide();
  for (uint32_t divisor = 1; divisor < 3000; ++divisor) quotient_is_a_division(divisor);
  for (int bit = 2; bit < 31; ++bit) {
    for (const int near : {-1, 0, 1}) {
      quotient_is_a_division((1u << bit) + static_cast<uint32_t>(near));
    }
  }
  quotient_is_a_division(0x7fffffffu);
}
