// Random programs: the CPU engine and the code of the CUDA kernels (grid_tile.h, run on the CPU)
// give the bytes of a reference that computes one element at a time. All programs here are so small
// that the CPU engine runs them on one thread; tests/run/test_native_copy.py tests it with several.
#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "rvdcomm/copy_plan.h"
#include "rvdcomm/copy_program.h"
#include "rvdcomm/grid_tile.h"

using namespace rvdcomm;

namespace {

constexpr int64_t kBufferBytes = 1 << 15;
constexpr int kNumBuffers = 3;

/// Buffers that start at a 16-byte boundary and are filled with random bits. Bit 6 of every byte is
/// 0, which clears a high exponent bit of every float. So no element is infinite or NaN, except the
/// one NaN of the fnuz dtypes. Two different NaNs must not be added, because it is not defined
/// which of them the sum keeps.
class Buffers {
 public:
  explicit Buffers(unsigned seed) {
    std::mt19937 random(seed);
    for (auto& buffer : data_) {
      buffer.resize(kBufferBytes / 16);
      for (Vector16& vector : buffer) {
        for (uint32_t& word : vector.word) word = static_cast<uint32_t>(random()) & 0xbfbfbfbfu;
      }
    }
  }

  std::vector<void*> addresses() {
    std::vector<void*> result;
    for (auto& buffer : data_) result.push_back(buffer.data());
    return result;
  }

  bool operator==(const Buffers& other) const {
    for (int i = 0; i < kNumBuffers; ++i) {
      if (memcmp(data_[i].data(), other.data_[i].data(), kBufferBytes) != 0) return false;
    }
    return true;
  }

 private:
  std::vector<Vector16> data_[kNumBuffers];
};

class RandomPrograms {
 public:
  explicit RandomPrograms(unsigned seed) : random_(seed) {}

  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }

  /// An op whose sources are in other buffers than dst, so that it does not read what it writes.
  CopyOp op(DType src_dtype, DType dst_dtype, int num_srcs) {
    CopyOp op{below(4), {}, {}, {}};
    for (int d = 0; d < op.num_dims; ++d) op.shape[d] = 1 + below(d == op.num_dims - 1 ? 24 : 6);
    const int dst = below(kNumBuffers);
    op.dst = side(op, dst, dst_dtype);
    for (int i = 0; i < num_srcs; ++i) {
      op.srcs.push_back(side(op, (dst + 1 + below(kNumBuffers - 1)) % kNumBuffers, src_dtype));
    }
    return op;
  }

 private:
  /// A side whose strides are those of a box in a row-major array. Sometimes the dims are permuted.
  Side side(const CopyOp& op, int buffer, DType dtype) {
    Side result{buffer, dtype, 0, {}};
    int order[kMaxDims];
    for (int d = 0; d < op.num_dims; ++d) order[d] = d;
    if (below(3) == 0) std::shuffle(order, order + op.num_dims, random_);
    int64_t stride = 1;
    for (int i = op.num_dims - 1; i >= 0; --i) {
      result.stride[order[i]] = stride;
      stride *= op.shape[order[i]] + (below(2) == 0 ? 0 : below(3));
    }
    result.offset = below(2) * 16;
    return result;
  }

  std::mt19937 random_;
};

template <DType kDType>
void sum_element(const CopyOp& op, const int64_t* offsets, void* const* buffers, bool wide) {
  using Element = ElementOf<kDType>;
  const auto read = [&](size_t i) {
    typename Element::Bits bits;
    memcpy(&bits, static_cast<char*>(buffers[op.srcs[i].buffer]) + offsets[i + 1], sizeof(bits));
    return bits;
  };
  auto sum = Element::load(read(0));
  for (size_t i = 1; i < op.srcs.size(); ++i) {
    sum = wide ? accumulate<kDType, true>(sum, read(i)) : accumulate<kDType, false>(sum, read(i));
  }
  using Wide = typename WideOf<typename Element::Value>::type;
  store_as<Wide>(op.dst.dtype, static_cast<char*>(buffers[op.dst.buffer]) + offsets[0],
                 static_cast<Wide>(sum));
}

/// The reference: computes one element at a time.
void run_by_definition(const std::vector<CopyOp>& ops, void* const* buffers, bool wide) {
  for (const CopyOp& op : ops) {
    StridedBox box{op.num_dims, {}, 0, {}};
    std::copy(op.shape, op.shape + op.num_dims, box.shape);
    for (int64_t flat = 0; flat < num_elements(box); ++flat) {
      std::vector<int64_t> offsets;
      for (size_t i = 0; i <= op.srcs.size(); ++i) {
        const Side& side = i == 0 ? op.dst : op.srcs[i - 1];
        box.offset = side.offset;
        std::copy(side.stride, side.stride + op.num_dims, box.stride);
        offsets.push_back(offset_from_flat(box, flat) * item_bytes(side.dtype));
      }
      char* dst = static_cast<char*>(buffers[op.dst.buffer]) + offsets[0];
      const auto item = static_cast<size_t>(item_bytes(op.dst.dtype));
      if (op.srcs.empty()) {
        memset(dst, 0, item);
      } else if (op.srcs.size() == 1 && op.srcs[0].dtype == op.dst.dtype) {
        memmove(dst, static_cast<char*>(buffers[op.srcs[0].buffer]) + offsets[1], item);
      } else {
        switch (op.srcs[0].dtype) {
#define RVD_SUM_ELEMENT(name, bytes, summable) \
  case DType::k_##name: sum_element<DType::k_##name>(op, offsets.data(), buffers, wide); break;
          RVD_DTYPES(RVD_SUM_ELEMENT)
#undef RVD_SUM_ELEMENT
        }
      }
    }
  }
}

/// Run the code of the CUDA kernels on the CPU, one GPU thread after another.
void run_as_grid(const CopyProgram& program, void* const* buffers, int64_t alignment) {
  for (const GridBatch& batch : grid_batches(program, alignment)) {
    std::vector<char*> used;
    for (const int32_t buffer : batch.buffers) used.push_back(static_cast<char*>(buffers[buffer]));
    const GridView grid{batch.ops.data(), batch.sides.data(), used.data(),
                        static_cast<int32_t>(batch.ops.size())};
    for (int64_t tile = 0; tile < batch.num_tiles; ++tile) {
      for (int thread = 0; thread < kTileThreads; ++thread) {
        if (batch.has_sums) {
          run_tile<true>(grid, tile, thread);
        } else {
          run_tile<false>(grid, tile, thread);
        }
      }
    }
  }
}

void all_engines_agree(const std::vector<CopyOp>& ops, bool wide, unsigned seed) {
  Buffers expected(seed), cpu(seed), threaded(seed), grid(seed), narrow_grid(seed);
  run_by_definition(ops, expected.addresses().data(), wide);
  const CopyProgram program(ops, wide);
  program.run(cpu.addresses().data(), 1);
  CHECK(cpu == expected);
  program.run(threaded.addresses().data(), 3);
  CHECK(threaded == expected);
  run_as_grid(program, grid.addresses().data(), 16);
  CHECK(grid == expected);
  run_as_grid(program, narrow_grid.addresses().data(), 8);
  CHECK(narrow_grid == expected);
}

void random_moves_agree() {
  RandomPrograms random(1);
  for (unsigned seed = 0; seed < 400; ++seed) {
    std::vector<CopyOp> ops;
    const auto dtype = static_cast<DType>(random.below(kNumDTypes));
    for (int i = 0; i <= random.below(5); ++i)
      ops.push_back(random.op(dtype, dtype, random.below(2)));
    all_engines_agree(ops, false, seed);
  }
}

void random_sums_of_every_dtype_agree() {
  RandomPrograms random(2);
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (!info(dtype).summable) continue;
    for (unsigned seed = 0; seed < 12; ++seed) {
      all_engines_agree({random.op(dtype, dtype, 2 + random.below(3))}, seed % 2 == 1, seed);
    }
  }
}

void conversions_between_all_dtypes_agree() {
  RandomPrograms random(3);
  for (int i = 0; i < kNumDTypes; ++i) {
    for (int j = 0; j < kNumDTypes; ++j) {
      const auto src = static_cast<DType>(i), dst = static_cast<DType>(j);
      const int num_srcs = info(src).summable ? 1 + random.below(3) : 1;
      all_engines_agree({random.op(src, dst, num_srcs)}, false, 7);
    }
  }
}

/// A pack copies k blocks of columns to k contiguous pieces. Its ops are joined into one op, so it
/// is one launch.
void a_pack_is_one_batch() {
  std::vector<CopyOp> ops;
  for (int64_t peer = 0; peer < 4; ++peer) {
    CopyOp op{2, {24, 8}, {1, DType::k_float32, peer * 192, {8, 1}}, {}};
    op.srcs.push_back({0, DType::k_float32, peer * 8, {32, 1}});
    ops.push_back(op);
  }
  const CopyProgram program(ops, false);
  CHECK(program.plan().size() == 1);
  CHECK(grid_batches(program, 16).size() == 1);
  CHECK(program.num_bytes() == 4 * 24 * 8 * 4);
  CHECK(program.num_buffers() == 2);
  all_engines_agree(ops, false, 5);
}

/// Columns of single bytes. Tiles belong to three parts in turn; the last tile of a part is not
/// full.
void tiles_of_a_pack_take_turns() {
  CopyOp pack{2, {3, 1500}, {1, DType::k_uint8, 0, {1500, 1}}, {}};
  pack.srcs.push_back({0, DType::k_uint8, 0, {1, 3}});
  CopyOp sum = pack;
  sum.srcs.push_back({0, DType::k_uint8, 5, {1, 3}});
  for (const CopyOp& op : {pack, sum}) {
    const GridBatch batch = grid_batches(CopyProgram({op}, false), 16).front();
    CHECK(batch.ops.front().parts.divisor == 3);
    CHECK(batch.num_tiles == 3 * 2);
    all_engines_agree({op}, false, 9);
  }
}

/// Blocks of columns of different widths interleave in memory. They are independent, so they are
/// one batch.
void ragged_columns_of_one_array_are_one_batch() {
  std::vector<CopyOp> ops;
  const int64_t cuts[] = {0, 3, 10, 12};
  for (int i = 0; i < 3; ++i) {
    CopyOp op{2, {20, cuts[i + 1] - cuts[i]}, {1, DType::k_int16, cuts[i], {12, 1}}, {}};
    op.srcs.push_back({0, DType::k_int16, 20 * cuts[i], {cuts[i + 1] - cuts[i], 1}});
    ops.push_back(op);
  }
  const CopyProgram program(ops, false);
  CHECK(grid_batches(program, 16).size() == 1);
  all_engines_agree(ops, false, 6);
}

void dependent_ops_are_separate_batches() {
  const Side a{0, DType::k_int32, 0, {1}}, b{1, DType::k_int32, 0, {1}};
  const std::vector<CopyOp> ops{{1, {64}, b, {a}}, {1, {64}, a, {b, b}}};
  CHECK(grid_batches(CopyProgram(ops, false), 16).size() == 2);
  all_engines_agree(ops, false, 8);
}

/// Every row has a buffer of its own on either side, more than a launch takes.
void more_buffers_than_a_launch_takes_are_several_batches() {
  constexpr int32_t kRows = 300, kLength = 8;
  std::vector<std::vector<int32_t>> rows(2 * kRows, std::vector<int32_t>(kLength));
  std::vector<void*> addresses;
  std::vector<CopyOp> ops;
  for (int32_t i = 0; i < 2 * kRows; ++i) {
    std::fill(rows[i].begin(), rows[i].end(), i);
    addresses.push_back(rows[i].data());
  }
  for (int32_t i = 0; i < kRows; ++i) {
    CopyOp op{1, {kLength}, {i, DType::k_int32, 0, {1}}, {}};
    op.srcs.push_back({2 * kRows - 1 - i, DType::k_int32, 0, {1}});
    ops.push_back(op);
  }
  const CopyProgram program(ops, false);
  const std::vector<GridBatch> batches = grid_batches(program, 16);
  CHECK(batches.size() == 3);
  for (const GridBatch& batch : batches) CHECK(batch.buffers.size() <= kMaxBuffers);
  run_as_grid(program, addresses.data(), 16);
  for (int32_t i = 0; i < kRows; ++i) {
    CHECK(rows[i] == std::vector<int32_t>(kLength, 2 * kRows - 1 - i));
  }
}

/// An op is never split by its sources, so it may not have more buffers than a launch takes.
void an_op_of_too_many_buffers_throws() {
  CopyOp op{1, {4}, {0, DType::k_int32, 0, {1}}, {}};
  for (int32_t i = 1; i < kMaxBuffers; ++i) op.srcs.push_back({i, DType::k_int32, 0, {1}});
  CHECK(grid_batches(CopyProgram({op}, false), 16).front().buffers.size() == kMaxBuffers);
  op.srcs.push_back({kMaxBuffers, DType::k_int32, 0, {1}});
  bool has_thrown = false;
  try {
    grid_batches(CopyProgram({op}, false), 16);
  } catch (const std::invalid_argument&) {
    has_thrown = true;
  }
  CHECK(has_thrown);
}

/// Bytes of all units of an op. Only plans the op, because its buffers would be too large to run
/// it.
int64_t planned_bytes(const CopyOp& op) {
  int64_t bytes = 0;
  for (const GridBatch& batch : grid_batches(CopyProgram({op}, false), 16)) {
    for (const GridOp& grid : batch.ops) {
      const int64_t units = int64_t{grid.part_units} * grid.parts.divisor;
      CHECK(units <= int64_t{1} << 30);
      bytes += units * grid.unit_bytes;
    }
  }
  return bytes;
}

void more_units_than_31_bits_are_split() {
  CopyOp op{2, {3, int64_t{1} << 33}, {0, DType::k_uint8, 0, {int64_t{1} << 34, 1}}, {}};
  op.srcs.push_back({1, DType::k_uint8, 1, {int64_t{1} << 34, 1}});
  CHECK(planned_bytes(op) == int64_t{3} << 33);
}

/// A permutation of the dims. Every dim is shorter than two vectors.
void many_units_along_short_dims_are_split() {
  constexpr int kDims = 7;
  constexpr int64_t kSize = 20;
  CopyOp op{kDims, {}, {0, DType::k_uint8, 0, {}}, {{1, DType::k_uint8, 0, {}}}};
  int64_t num_elements = 1;
  for (int d = 0; d < kDims; ++d) {
    op.shape[d] = kSize;
    op.srcs[0].stride[d] = num_elements;
    op.dst.stride[kDims - 1 - d] = num_elements;
    num_elements *= kSize;
  }
  CHECK(planned_bytes(op) == num_elements);
}

/// Random sides of few buffers and sizes, so that some ops overlap, some interleave, some are
/// apart.
void an_index_finds_the_ops_that_a_scan_finds() {
  std::mt19937 random(11);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random()) % end; };
  int num_dependent = 0;
  for (int round = 0; round < 50; ++round) {
    const int64_t columns = 4 + below(40), width = 1 + below(3);
    const auto side = [&] {
      const Side block{static_cast<int32_t>(below(3)), DType::k_int16, below(3000), {columns, 1}};
      return block;
    };
    std::vector<PlanOp> ops;
    OpIndex index;
    for (size_t i = 0; i < 60; ++i) {
      CopyOp op{2, {1 + below(5), width}, side(), {side()}};
      const PlanOp later = normalize(op, i);
      const bool is_free = std::all_of(ops.begin(), ops.end(), [&](const PlanOp& earlier) {
        return independent(earlier, later);
      });
      CHECK(index.all_independent_of(later) == is_free);
      num_dependent += !is_free;
      ops.push_back(later);
      // The index points to its ops, so it is built anew where they have moved.
      index = {};
      for (const PlanOp& known : ops) index.add(known);
    }
  }
  CHECK(num_dependent > 100);
}

void errors_name_the_op() {
  const Side side{0, DType::k_float32, 0, {0}};
  try {
    CopyProgram({{1, {4}, side, {}}}, false);
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find("op 0 of a copy program: dst has stride 0") == 0);
  }
}

}  // namespace

int main() {
  random_moves_agree();
  random_sums_of_every_dtype_agree();
  conversions_between_all_dtypes_agree();
  a_pack_is_one_batch();
  tiles_of_a_pack_take_turns();
  ragged_columns_of_one_array_are_one_batch();
  dependent_ops_are_separate_batches();
  more_buffers_than_a_launch_takes_are_several_batches();
  an_op_of_too_many_buffers_throws();
  more_units_than_31_bits_are_split();
  many_units_along_short_dims_are_split();
  an_index_finds_the_ops_that_a_scan_finds();
  errors_name_the_op();
}
