// Element types: the same names and sizes as rvdcomm/layout/dtypes.py.
#pragma once

#include <cstdint>
#include <string_view>

namespace rvdcomm {

// name, bytes of one element, whether values can be summed (for bool, logical or, as in torch)
#define RVD_DTYPES(X)         \
  X(bool, 1, true)            \
  X(uint8, 1, true)           \
  X(uint16, 2, true)          \
  X(uint32, 4, true)          \
  X(uint64, 8, true)          \
  X(int8, 1, true)            \
  X(int16, 2, true)           \
  X(int32, 4, true)           \
  X(int64, 8, true)           \
  X(float8_e4m3fn, 1, true)   \
  X(float8_e4m3fnuz, 1, true) \
  X(float8_e5m2, 1, true)     \
  X(float8_e5m2fnuz, 1, true) \
  X(float8_e8m0fnu, 1, false) \
  X(float16, 2, true)         \
  X(bfloat16, 2, true)        \
  X(float32, 4, true)         \
  X(float64, 8, true)         \
  X(complex32, 4, true)       \
  X(complex64, 8, true)       \
  X(complex128, 16, true)

/// The element types: `k_` and the name that torch uses.
enum class DType : int32_t {
#define RVD_ENUM(name, bytes, summable) k_##name,
  RVD_DTYPES(RVD_ENUM)
#undef RVD_ENUM
};

struct DTypeInfo {
  const char* name;
  int32_t bytes;
  bool summable;
};

inline constexpr DTypeInfo kDTypes[] = {
#define RVD_INFO(name, bytes, summable) {#name, bytes, summable},
    RVD_DTYPES(RVD_INFO)
#undef RVD_INFO
};
inline constexpr int kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

inline const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }
inline int64_t item_bytes(DType dtype) { return info(dtype).bytes; }

/// The dtype of that name.
/// @throws std::invalid_argument that lists the known names.
DType dtype_from_name(std::string_view name);

}  // namespace rvdcomm
