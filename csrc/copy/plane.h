// The innermost two dims of a copy: rows of runs.
#pragma once

#include <cstdint>

namespace rvdcomm {

/// `rows` x `cols` runs of `run_bytes`. Strides are in bytes.
struct Plane {
  int64_t rows, cols, run_bytes;
  int64_t dst_row, dst_col, src_row, src_col;
};

/// Copies every run of a plane, row by row.
using PlaneFn = void (*)(char* dst, const char* src, const Plane& plane);

/// The function for runs of this length.
PlaneFn copy_plane(int64_t run_bytes);

/// The same with stores that bypass the caches; null if the target has no SSE2.
/// @pre run_bytes, dst and both dst strides are multiples of kStreamAlign
PlaneFn stream_plane(int64_t run_bytes);
inline constexpr int64_t kStreamAlign = 16;

/// Make streamed stores visible to other threads before all later stores.
void stream_fence();

/// Fills every run with zeros; src is not read.
void zero_plane(char* dst, const char* src, const Plane& plane);

}  // namespace rvdcomm
