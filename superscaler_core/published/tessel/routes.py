"""Routes that are often searched: a line, a line that is passed several times, a V, both ways."""

from __future__ import annotations

from superscaler_core.schedules.schedule import WorkerRoute


def straight_routes(num_workers: int) -> tuple[WorkerRoute, ...]:
    """Worker d holds stage d, as in GPipe, 1F1B and ZB-H1."""
    return looped_routes(num_workers, 1)


def looped_routes(num_workers: int, num_chunks: int) -> tuple[WorkerRoute, ...]:
    """Stages are dealt out to workers in turn, as in interleaved 1F1B.

    >>> looped_routes(2, 2)
    (((0,), (1,), (0,), (1,)),)
    """
    return (tuple((stage % num_workers,) for stage in range(num_workers * num_chunks)),)


def v_routes(num_workers: int) -> tuple[WorkerRoute, ...]:
    """Stages go down the workers and back up, as in ZB-V: worker 0 has the first and the last.

    >>> v_routes(2)
    (((0,), (1,), (1,), (0,)),)
    """
    down = tuple((worker,) for worker in range(num_workers))
    return ((*down, *reversed(down)),)


def both_ways(num_workers: int) -> tuple[WorkerRoute, ...]:
    """Half of the microbatches go down the workers, and half go up, as in Chimera.

    >>> both_ways(2)
    (((0,), (1,)), ((1,), (0,)))
    """
    down = tuple((worker,) for worker in range(num_workers))
    return (down, tuple(reversed(down)))
