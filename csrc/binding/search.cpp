#include "bind.h"

namespace rvdcomm {

void bind_search(pybind11::module_& m) { (void)m; }

}  // namespace rvdcomm
