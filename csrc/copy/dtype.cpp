#include "rvdcomm/dtype.h"

#include <stdexcept>
#include <string>

namespace rvdcomm {

DType dtype_from_name(std::string_view name) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name == kDTypes[i].name) return static_cast<DType>(i);
  }
  std::string known;
  for (const DTypeInfo& dtype : kDTypes)
    known += (known.empty() ? "" : ", ") + std::string(dtype.name);
  throw std::invalid_argument("dtype '" + std::string(name) + "' is unknown; the known ones are " +
                              known + ".");
}

}  // namespace rvdcomm
