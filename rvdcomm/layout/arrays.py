"""Arrays: the two types of numpy arrays that planning uses, for integers and for masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
