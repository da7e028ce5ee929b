#include "bind.h"

namespace rvdcomm {

void bind_signal(pybind11::module_& m) { (void)m; }

}  // namespace rvdcomm
