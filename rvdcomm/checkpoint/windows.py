"""Windows: boxes of bounded size that tile a tensor; each is one contiguous range of a file.

A window fixes the indices of the outer dims, takes a range of one dim, and has all indices of the
inner dims. In a file that stores a box in row-major order, the intersection of the window and the
box is contiguous, and directly follows the intersection of the previous window. So a tensor of any
size is moved from any shards to any others in one pass of contiguous reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rvdcomm.layout import Box


def windows(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Boxes of up to ``max_elements`` that tile a tensor, in row-major order; none if it is empty.

    Laws (tests/checkpoint/test_windows.py): the windows tile the tensor; the intersection of a
    window and a box is one contiguous run of the box, directly after the previous window's run.

    >>> [str(window) for window in windows((2, 3), max_elements=2)]
    ['[0:1,0:2]', '[0:1,2:3]', '[1:2,0:2]', '[1:2,2:3]']
    """
    whole = Box.of_shape(shape)
    if whole.is_empty:
        return
    d, row = len(shape), 1
    while d and row * shape[d - 1] <= max_elements:
        d -= 1
        row *= shape[d]
    if d == 0:
        yield whole
        return
    # Dims from d on fit as a whole. Dim d - 1 does not; it is cut into ranges of `num_rows` rows.
    cut, num_rows = d - 1, max_elements // row
    for index in np.ndindex(*shape[:cut]):
        for start in range(0, shape[cut], num_rows):
            stop = min(start + num_rows, shape[cut])
            yield Box(
                (*index, start, *(0,) * (len(shape) - d)),
                (*(i + 1 for i in index), stop, *shape[d:]),
            )
