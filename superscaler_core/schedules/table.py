"""The table of schedules: every generator by its name, and the options that all of them have."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature

from superscaler_core.schedules.chimera import chimera
from superscaler_core.schedules.dualpipe import dualpipe, dualpipe_v
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.gpipe import gpipe
from superscaler_core.schedules.interlaced import interlaced
from superscaler_core.schedules.interleaved import interleaved, looped_bfs
from superscaler_core.schedules.naive import naive
from superscaler_core.schedules.nf1b import nf1b
from superscaler_core.schedules.one_f_one_b import one_f_one_b
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.split_backward import recompute_apart, split_backward
from superscaler_core.schedules.zero_bubble import zero_bubble, zero_bubble_h2
from superscaler_core.schedules.zero_bubble_v import zero_bubble_v

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "interlaced": interlaced,
    "nf1b": nf1b,
    "zero-bubble": zero_bubble,
    "zero-bubble-h2": zero_bubble_h2,
    "zero-bubble-v": zero_bubble_v,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
"""Functions that generate schedules, by the name of the schedule."""


def named(
    name: str,
    num_workers: int,
    num_microbatches: int,
    *,
    chunks: int = 1,
    halves: bool = False,
    apart: bool = False,
) -> Schedule:
    """The schedule of a name, with the options that all schedules have.

    >>> print(named("gpipe", 2, 2, halves=True))
    gpipe-split stages=2 microbatches=2
    worker 0: 0F0 0F1 0I0 0W0 0I1 0W1
    worker 1: 1F0 1F1 1I0 1W0 1I1 1W1

    Args:
        name: a name in ``SCHEDULES``.
        num_workers, num_microbatches: as the schedule takes them.
        chunks: stages a worker, of interleaved and looped-bfs; of others it is 1.
        halves: whether every backward is an I and a W, as by ``split_backward``.
        apart: whether every recomputation is an action, as by ``recompute_apart``.

    Raises:
        ScheduleError: there is no such schedule, it has no choice of chunks, or it does not take
            these counts.
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, 3)
        hint = f" Is it {' or '.join(near)}?" if near else ""
        raise ScheduleError(f"no schedule is {name!r}; there are {', '.join(SCHEDULES)}.{hint}")
    generate = SCHEDULES[name]
    takes_chunks = "num_chunks" in signature(generate).parameters
    if chunks != 1 and not takes_chunks:
        raise ScheduleError(
            f"schedule {name} with chunks={chunks}: only interleaved and looped-bfs have a choice "
            "of stages a worker; leave chunks out."
        )
    knobs = {"num_chunks": chunks} if takes_chunks else {}
    schedule = generate(num_workers, num_microbatches, **knobs)
    schedule = split_backward(schedule) if halves else schedule
    return recompute_apart(schedule) if apart else schedule
