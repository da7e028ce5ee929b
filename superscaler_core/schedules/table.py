"""The table of schedules: every generator by its name, and the options that all of them have."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from superscaler_core.schedules.dualpipe import dualpipe, dualpipe_v
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.interlaced import interlaced
from superscaler_core.schedules.interleaved import interleaved, looped_bfs
from superscaler_core.schedules.nf1b import nf1b
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.split_backward import recompute_apart, split_backward
from superscaler_core.schedules.straight import gpipe, naive, one_f_one_b
from superscaler_core.schedules.zero_bubble import zero_bubble, zero_bubble_h2, zero_bubble_v
from superscaler_core.table import Table

Generator = Callable[..., Schedule]
"""Takes the numbers of workers, D, and of microbatches, N, and may take further arguments."""

SCHEDULES: Table[Generator] = Table(
    "schedules",
    {
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
        "dualpipe": dualpipe,
        "dualpipe-v": dualpipe_v,
    },
)
"""Functions that generate schedules, by the name of the schedule."""


def generate(
    generator: Generator,
    num_workers: int,
    num_microbatches: int,
    *,
    chunks: int = 1,
    halves: bool = False,
    apart: bool = False,
) -> Schedule:
    """A generator's schedule, with the options that all schedules have.

    >>> print(generate(SCHEDULES["gpipe"], 2, 2, halves=True))
    gpipe-split stages=2 microbatches=2
    worker 0: 0F0 0F1 0I0 0W0 0I1 0W1
    worker 1: 1F0 1F1 1I0 1W0 1I1 1W1

    Args:
        generator: a value of ``SCHEDULES``, or another function of this form.
        num_workers, num_microbatches: as the generator takes them.
        chunks: stages per worker, for ``interleaved`` and ``looped_bfs``; 1 for all others.
        halves: whether every backward is an I and a W, as by ``split_backward``.
        apart: whether every recompute is an action, as by ``recompute_apart``.

    Raises:
        ScheduleError: the generator has no choice of chunks, or does not take these counts.
    """
    takes_chunks = "chunks" in signature(generator).parameters
    if chunks != 1 and not takes_chunks:
        name = getattr(generator, "__name__", generator)
        raise ScheduleError(
            f"{name} with chunks={chunks}: only interleaved and looped_bfs have a choice of stages "
            "a worker; leave chunks out."
        )
    options = {"chunks": chunks} if takes_chunks else {}
    schedule = generator(num_workers, num_microbatches, **options)
    schedule = split_backward(schedule) if halves else schedule
    return recompute_apart(schedule) if apart else schedule
