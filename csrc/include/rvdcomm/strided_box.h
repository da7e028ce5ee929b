// A box of a strided array, and the maps between its indices.
#pragma once

#include <cstdint>

#include "rvdcomm/macros.h"

namespace rvdcomm {

/// Dims of a box after coalescing; an op with more is peeled into several.
inline constexpr int kMaxDims = 8;

/// `shape[0..num_dims)` elements at `offset + dot(coord, stride)`, in whatever unit the user
/// counts.
struct StridedBox {
  int32_t num_dims;
  int64_t shape[kMaxDims];
  int64_t offset;
  int64_t stride[kMaxDims];
};

/// Elements of the box; 1 for a box without dims.
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

/// Where the element of a coordinate lies.
RVD_HD int64_t offset_from_coord(const StridedBox& box, const int64_t* coord) {
  int64_t offset = box.offset;
  for (int d = 0; d < box.num_dims; ++d) offset += coord[d] * box.stride[d];
  return offset;
}

/// Where the element of a row-major number lies.
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
