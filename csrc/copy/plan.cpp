#include "rvdcomm/copy_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace rvdcomm {
namespace {

/// Check the byte range of a side, so that later arithmetic on its offsets cannot overflow.
void check_reach(const CopyOp& op, const Side& side, size_t index) {
  __extension__ typedef __int128 Wide;
  const Wide item = item_bytes(side.dtype);
  Wide low = item * side.offset, high = low;
  for (int d = 0; d < op.num_dims; ++d) {
    const Wide reach = item * side.stride[d] * (op.shape[d] - 1);
    (reach < 0 ? low : high) += reach;
  }
  if (low < 0 || high > std::numeric_limits<int64_t>::max() / 2) {
    refuse(index,
           "a side of dtype " + std::string(info(side.dtype).name) + " at offset " +
               std::to_string(side.offset) + " of buffer " + std::to_string(side.buffer) +
               (low < 0 ? " reaches below its buffer's start" : " reaches beyond 2^62 bytes") +
               "; offsets and strides count elements.");
  }
}

void check(const CopyOp& op, size_t index) {
  if (op.num_dims < 0 || op.num_dims > kMaxDims) {
    refuse(index, std::to_string(op.num_dims) + " dims; give 0 to " + std::to_string(kMaxDims) +
                      ", or let append_ops() peel them.");
  }
  bool is_empty = false;
  for (int d = 0; d < op.num_dims; ++d) {
    if (op.shape[d] < 0) {
      refuse(index, "dim " + std::to_string(d) + " has size " + std::to_string(op.shape[d]) +
                        "; a size is 0 or more.");
    }
    is_empty = is_empty || op.shape[d] == 0;
  }
  for (size_t i = 0; i <= op.srcs.size(); ++i) {
    const Side& side = i == 0 ? op.dst : op.srcs[i - 1];
    if (side.buffer < 0) {
      refuse(index, "buffer " + std::to_string(side.buffer) + "; buffers count from 0.");
    }
    if (!is_empty) check_reach(op, side, index);
  }
  for (int d = 0; d < op.num_dims && !is_empty; ++d) {
    if (op.shape[d] > 1 && op.dst.stride[d] == 0) {
      refuse(index, "dst has stride 0 in dim " + std::to_string(d) + " of size " +
                        std::to_string(op.shape[d]) +
                        ", so that elements overwrite each other; only a source may repeat.");
    }
  }
  if (op.srcs.size() < 2) return;
  const DTypeInfo& first = info(op.srcs[0].dtype);
  if (!first.summable) refuse(index, std::string(first.name) + " values cannot be summed.");
  for (const Side& src : op.srcs) {
    if (src.dtype != op.srcs[0].dtype) {
      refuse(index, "sums " + std::string(first.name) + " and " + info(src.dtype).name +
                        "; the sources of a sum have one dtype (dst may have another).");
    }
  }
}

void erase_dim(PlanOp& op, int dim) {
  --op.num_dims;
  for (int d = dim; d < op.num_dims; ++d) op.shape[d] = op.shape[d + 1];
  for_sides(op, [&](PlanSide& side) {
    for (int d = dim; d < op.num_dims; ++d) side.stride[d] = side.stride[d + 1];
  });
}

void swap_dims(PlanOp& op, int a, int b) {
  std::swap(op.shape[a], op.shape[b]);
  for_sides(op, [&](PlanSide& side) { std::swap(side.stride[a], side.stride[b]); });
}

/// Whether dims `outer` and `outer + 1` can be merged into one dim on every side.
bool merges(PlanOp& op, int outer) {
  bool result = true;
  for_sides(op, [&](const PlanSide& side) {
    result = result && side.stride[outer] == side.stride[outer + 1] * op.shape[outer + 1];
  });
  return result;
}

}  // namespace

void refuse(size_t index, const std::string& what) {
  throw std::invalid_argument("op " + std::to_string(index) + " of a copy program: " + what);
}

void canonicalize(PlanOp& op) {
  for (int d = op.num_dims - 1; d >= 0; --d) {
    if (op.shape[d] == 1) {
      erase_dim(op, d);
    } else if (op.dst.stride[d] < 0) {
      for_sides(op, [&](PlanSide& side) {
        side.offset += side.stride[d] * (op.shape[d] - 1);
        side.stride[d] = -side.stride[d];
      });
    }
  }
  for (int i = 1; i < op.num_dims; ++i) {
    for (int d = i; d > 0 && op.dst.stride[d - 1] < op.dst.stride[d]; --d) swap_dims(op, d - 1, d);
  }
  for (int d = op.num_dims - 2; d >= 0; --d) {
    if (!merges(op, d)) continue;
    op.shape[d] *= op.shape[d + 1];
    for_sides(op, [&](PlanSide& side) { side.stride[d] = side.stride[d + 1]; });
    erase_dim(op, d + 1);
  }
}

PlanOp normalize(const CopyOp& op, size_t index) {
  check(op, index);
  const auto in_bytes = [&](const Side& side) {
    PlanSide result{side.buffer, side.dtype, side.offset * item_bytes(side.dtype), {}};
    for (int d = 0; d < op.num_dims; ++d) {
      // A dim of size 1 needs no stride. check_reach does not limit its stride, so the product
      // could overflow.
      result.stride[d] = op.shape[d] > 1 ? side.stride[d] * item_bytes(side.dtype) : 0;
    }
    return result;
  };
  PlanOp plan{op.num_dims, {}, {}, {}, op.read_soon};
  std::copy(op.shape, op.shape + op.num_dims, plan.shape);
  if (plan.num_elements() == 0) {
    // An empty op writes nothing, and its offsets and strides were not checked.
    plan.num_dims = 1;
    plan.shape[0] = 0;
    plan.dst = {op.dst.buffer, op.dst.dtype, 0, {}};
    return plan;
  }
  plan.dst = in_bytes(op.dst);
  for (const Side& src : op.srcs) plan.srcs.push_back(in_bytes(src));
  canonicalize(plan);
  return plan;
}

}  // namespace rvdcomm
