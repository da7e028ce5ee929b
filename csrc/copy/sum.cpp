#include "sum.h"

#include <algorithm>

#include "plane.h"

namespace rvdcomm {
namespace {

// Bytes of a tile in the wider of the value type and the dst type. The three scratch rows fit in a
// first-level cache of 32 KiB, with 8 KiB left for sources. Every source is read in long pieces (2
// to 8 KiB), which the hardware prefetcher recognizes as streams.
constexpr int64_t kTileBytes = 8 << 10;

SumSide sum_side(const PlanOp& op, const PlanSide& side, int num_dims) {
  SumSide result{side.buffer, side.offset, {}, false};
  const int pad = num_dims - op.num_dims;
  for (int d = 0; d < op.num_dims; ++d) result.stride[d + pad] = side.stride[d];
  const int64_t item = item_bytes(side.dtype);
  result.is_dense = op.num_dims == 0 || side.stride[op.num_dims - 1] == item;
  return result;
}

/// The tile of a sum whose first element is at `coord`.
class Tile {
 public:
  Tile(const Sum& sum, void* const* buffers, const int64_t* coord, int64_t rows, int64_t cols)
      : sum_(sum), buffers_(buffers), coord_(coord), rows_(rows), cols_(cols) {}

  void run(char* values, char* row) const {
    if (!fold()) run_one_by_one(values, row);
  }

  /// Bytes of a scratch row. `values` is two rows: the running sum, and a spare row behind it.
  static constexpr int64_t kSpare = kTileBytes;

 private:
  /// Add all sources in one loop, if they are few and nothing has to be gathered, scattered or
  /// converted. Returns whether it did.
  bool fold() const {
    const size_t num_srcs = sum_.srcs.size();
    if (num_srcs > kMaxFold || sum_.src_dtype != sum_.dst_dtype) return false;
    const int64_t item = item_bytes(sum_.src_dtype);
    const char* srcs[kMaxFold];
    for (size_t i = 0; i < num_srcs; ++i) {
      if (!is_one_run(sum_.srcs[i], item)) return false;
      srcs[i] = at(sum_.srcs[i]);
    }
    if (!is_one_run(sum_.dst, item)) return false;
    sum_.arithmetic->fold[sum_.wide][num_srcs](at(sum_.dst), srcs, rows_ * cols_);
    return true;
  }

  void run_one_by_one(char* values, char* row) const {
    const Arithmetic& loops = *sum_.arithmetic;
    const int64_t count = rows_ * cols_;
    const size_t num_srcs = sum_.srcs.size();
    const bool converts = sum_.src_dtype != sum_.dst_dtype;
    const int64_t src_item = item_bytes(sum_.src_dtype), dst_item = item_bytes(sum_.dst_dtype);
    // Without a conversion, add_store adds the last source and stores the result. With a
    // conversion, all sources are added before it.
    const size_t num_added = converts ? num_srcs : num_srcs - 1;

    const char* sum = read(sum_.srcs[0], src_item, values + kSpare);
    if (!loops.is_plain || num_added > 1) {
      loops.load(values, sum, count);
      sum = values;
    }
    for (size_t i = 1; i < num_added; ++i) {
      loops.add[sum_.wide](values, read(sum_.srcs[i], src_item, row), count);
    }
    char* dst = at(sum_.dst);
    // add_store may write to the spare row from which it reads `sum`, because `sum` is in that row
    // only if values and elements are the same type. A conversion may change the size of elements,
    // so it writes to another row.
    char* to = is_one_run(sum_.dst, dst_item) ? dst : converts ? row : values + kSpare;
    if (converts) {
      loops.convert[static_cast<int>(sum_.dst_dtype)](to, sum, count);
    } else {
      loops.add_store(to, sum, read(sum_.srcs[num_srcs - 1], src_item, row), count);
    }
    if (to != dst) move(dst, sum_.dst, to, dst_item, true);
  }

  char* at(const SumSide& side) const {
    int64_t offset = side.offset;
    for (int d = 0; d < sum_.num_dims; ++d) offset += coord_[d] * side.stride[d];
    return static_cast<char*>(buffers_[side.buffer]) + offset;
  }

  bool is_one_run(const SumSide& side, int64_t item) const {
    const int64_t row_stride = side.stride[sum_.num_dims - 2];
    return (side.is_dense || cols_ == 1) && (rows_ == 1 || row_stride == item * cols_);
  }

  /// Prefetch the bytes after a run, which the next tile reads, while the other sources are added.
  static void fetch(const char* from, int64_t num_bytes) {
#if defined(__GNUC__)
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
#endif
  }

  /// The elements of a side as one contiguous run: in place if possible, else gathered into `row`.
  const char* read(const SumSide& side, int64_t item, char* row) const {
    char* src = at(side);
    if (is_one_run(side, item)) {
      fetch(src + rows_ * cols_ * item, rows_ * cols_ * item);
      return src;
    }
    move(src, side, row, item, false);
    return row;
  }

  /// Copy a contiguous row to the plane of a side at `at` if `scatters`, else the plane to the row.
  void move(char* at, const SumSide& side, char* row, int64_t item, bool scatters) const {
    const int64_t run = side.is_dense ? item * cols_ : item;
    const int64_t row_stride = side.stride[sum_.num_dims - 2];
    const int64_t col_stride = side.is_dense ? 0 : side.stride[sum_.num_dims - 1];
    const int64_t cols = side.is_dense ? 1 : cols_;
    const Plane plane = scatters
                            ? Plane{rows_, cols, run, row_stride, col_stride, item * cols_, item}
                            : Plane{rows_, cols, run, item * cols_, item, row_stride, col_stride};
    copy_plane(run)(scatters ? at : row, scatters ? row : at, plane);
  }

  const Sum& sum_;
  void* const* buffers_;
  const int64_t* coord_;
  int64_t rows_, cols_;
};

}  // namespace

Sum sum_from_op(const PlanOp& op, bool wide) {
  Sum sum{};
  sum.num_dims = std::max(op.num_dims, 2);
  const int pad = sum.num_dims - op.num_dims;
  for (int d = 0; d < sum.num_dims; ++d) sum.shape[d] = d < pad ? 1 : op.shape[d - pad];
  sum.src_dtype = op.srcs[0].dtype;
  sum.dst_dtype = op.dst.dtype;
  sum.wide = wide;
  sum.arithmetic = &arithmetic(sum.src_dtype);
  sum.dst = sum_side(op, op.dst, sum.num_dims);
  for (const PlanSide& src : op.srcs) sum.srcs.push_back(sum_side(op, src, sum.num_dims));
  const int64_t cols = std::max<int64_t>(sum.shape[sum.num_dims - 1], 1);
  const int64_t widest = std::max(sum.arithmetic->value_bytes, item_bytes(sum.dst_dtype));
  const int64_t elements = kTileBytes / std::max<int64_t>(widest, 4);
  sum.tile_cols = std::min(cols, elements);
  sum.tile_rows = std::max<int64_t>(elements / cols, 1);
  return sum;
}

void run_sum(const Sum& sum, const int64_t* start, const int64_t* end, void* const* buffers) {
  alignas(64) char values[2 * Tile::kSpare], row[Tile::kSpare];
  const int rows = sum.num_dims - 2, cols = rows + 1;
  int64_t step[kMaxDims + 2], coord[kMaxDims + 2];
  for (int d = 0; d < sum.num_dims; ++d) {
    if (start[d] >= end[d]) return;
    step[d] = d == rows ? sum.tile_rows : d == cols ? sum.tile_cols : 1;
    coord[d] = start[d];
  }
  for (;;) {
    Tile(sum, buffers, coord, std::min(step[rows], end[rows] - coord[rows]),
         std::min(step[cols], end[cols] - coord[cols]))
        .run(values, row);
    int d = cols;
    for (; d >= 0; --d) {
      coord[d] += step[d];
      if (coord[d] < end[d]) break;
      coord[d] = start[d];
    }
    if (d < 0) return;
  }
}

}  // namespace rvdcomm
