// Splits ops with any number of dims into ops with at most kMaxDims dims.
#include <algorithm>
#include <string>

#include "rvdcomm/copy_plan.h"

namespace rvdcomm {

void append_ops(std::vector<CopyOp>& ops, std::vector<int64_t> shape, DimsSide dst,
                std::vector<DimsSide> srcs) {
  std::vector<DimsSide*> sides{&dst};
  for (DimsSide& src : srcs) sides.push_back(&src);
  for (const DimsSide* side : sides) {
    if (side->stride.size() != shape.size()) {
      refuse(ops.size(), "a side has " + std::to_string(side->stride.size()) + " strides for " +
                             std::to_string(shape.size()) + " dims; give one a dim.");
    }
  }
  for (size_t d = shape.size(); d-- > 0 && shape.size() > kMaxDims;) {
    const bool is_one = shape[d] == 1;
    const bool is_joined =
        d + 1 < shape.size() && std::all_of(sides.begin(), sides.end(), [&](const DimsSide* side) {
          return side->stride[d] == side->stride[d + 1] * shape[d + 1];
        });
    if (!is_one && !is_joined) continue;
    if (is_joined) shape[d + 1] *= shape[d];
    shape.erase(shape.begin() + static_cast<ptrdiff_t>(d));
    for (DimsSide* side : sides)
      side->stride.erase(side->stride.begin() + static_cast<ptrdiff_t>(d));
  }
  if (shape.size() > kMaxDims) {
    const int64_t count = shape[0];
    std::vector<int64_t> steps;
    for (DimsSide* side : sides) {
      steps.push_back(side->stride[0]);
      side->stride.erase(side->stride.begin());
    }
    shape.erase(shape.begin());
    for (int64_t i = 0; i < count; ++i) {
      append_ops(ops, shape, dst, srcs);
      for (size_t k = 0; k < sides.size(); ++k) sides[k]->offset += steps[k];
    }
    return;
  }
  const auto fixed = [&](const DimsSide& side) {
    Side result{side.buffer, side.dtype, side.offset, {}};
    std::copy(side.stride.begin(), side.stride.end(), result.stride);
    return result;
  };
  CopyOp op{static_cast<int32_t>(shape.size()), {}, fixed(dst), {}, false};
  std::copy(shape.begin(), shape.end(), op.shape);
  for (const DimsSide& src : srcs) op.srcs.push_back(fixed(src));
  ops.push_back(std::move(op));
}

}  // namespace rvdcomm
