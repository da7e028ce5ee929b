#include "bind.h"

namespace rvdcomm {

void bind_copy(pybind11::module_& m) { (void)m; }

}  // namespace rvdcomm
