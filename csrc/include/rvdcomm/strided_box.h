// A box of a strided array, and maps between coordinates, row-major numbers and offsets.
#pragma once

#include <cstdint>

#include "rvdcomm/macros.h"

namespace rvdcomm {

/// Largest number of dims of a box. append_ops() coalesces the dims of a larger op, and splits it
/// if more dims are left.
inline constexpr int kMaxDims = 8;

/// Elements of shape `shape[0..num_dims)`, at `offset + dot(coord, stride)`. Offsets and strides
/// count elements or bytes, as the user chooses.
struct StridedBox {
  int32_t num_dims;
  int64_t shape[kMaxDims];
  int64_t offset;
  int64_t stride[kMaxDims];
};

/// Number of elements of the box; 1 for a box without dims.
RVD_HD int64_t num_elements(const StridedBox& box) {
  int64_t count = 1;
  for (int d = 0; d < box.num_dims; ++d) count *= box.shape[d];
  return count;
}

/// Row-major number of a coordinate.
/// @pre  0 <= coord[d] < shape[d]
/// @post 0 <= result < num_elements(box)
RVD_HD int64_t flat_from_coord(const StridedBox& box, const int64_t* coord) {
  int64_t flat = 0;
  for (int d = 0; d < box.num_dims; ++d) flat = flat * box.shape[d] + coord[d];
  return flat;
}

/// The offset of the element at a coordinate.
RVD_HD int64_t offset_from_coord(const StridedBox& box, const int64_t* coord) {
  int64_t offset = box.offset;
  for (int d = 0; d < box.num_dims; ++d) offset += coord[d] * box.stride[d];
  return offset;
}

/// The offset of the element with a row-major number.
/// @pre  0 <= flat < num_elements(box)
/// @post offset_from_flat(box, flat_from_coord(box, c)) == box.offset + dot(c, box.stride)
RVD_HD int64_t offset_from_flat(const StridedBox& box, int64_t flat) {
  int64_t offset = box.offset;
  for (int d = box.num_dims - 1; d >= 0; --d) {
    const int64_t rest = flat / box.shape[d];
    offset += (flat - rest * box.shape[d]) * box.stride[d];
    flat = rest;
  }
  return offset;
}

}  // namespace rvdcomm
