"""TeraPipe: a pipeline of slices of a sequence, so that one microbatch keeps all workers busy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import require_counts
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import one_f_one_b


def terapipe(num_workers: int, num_microbatches: int, num_slices: int) -> Schedule:
    """1F1B in which a worker runs each microbatch slice by slice, and backward from the last slice.

    Stage ``d * num_slices + i`` is slice i on worker d. It reads slice i of the previous worker,
    and the keys and values of slice i - 1 on its own worker. If slice i takes t_i on each of D
    workers, the forwards of a microbatch take ``sum of t_i + (D - 1) * max of t_i``.

    >>> print(terapipe(2, 1, 2))
    terapipe stages=4 microbatches=1
    worker 0: 0F0 1F0 1B0 0B0
    worker 1: 2F0 3F0 3B0 2B0

    Args:
        num_workers: D.
        num_microbatches: N.
        num_slices: number of slices of each sequence.

    Raises:
        ScheduleError: a count is below 1.

    Source: Li et al., TeraPipe, ICML 2021, for the slices; microbatches follow as in 1F1B.
    """
    require_counts("terapipe", num_slices=num_slices)
    whole = one_f_one_b(num_workers, num_microbatches)
    rows = (tuple(a for one in row for a in _slices(one, num_slices)) for row in whole.rows)
    return Schedule("terapipe", num_workers * num_slices, num_microbatches, tuple(rows))


def terapipe_edges(num_workers: int, num_slices: int) -> tuple[tuple[int, int], ...]:
    """The stage graph: a slice reads itself on the previous worker, and the slice before it.

    >>> terapipe_edges(2, 2)
    ((0, 1), (0, 2), (1, 3), (2, 3))
    """
    cells = [*product(range(num_workers), range(num_slices))]
    number = {cell: d * num_slices + i for cell in cells for d, i in [cell]}
    pairs = (
        (cell, after) for cell in cells for d, i in [cell] for after in ((d, i + 1), (d + 1, i))
    )
    return tuple((number[a], number[b]) for a, b in pairs if b in number)


def _slices(whole: Action, num: int) -> Iterator[Action]:
    slices = range(num) if whole.kind is ActionKind.FORWARD else reversed(range(num))
    return (Action(whole.kind, whole.stage * num + i, whole.microbatch) for i in slices)
