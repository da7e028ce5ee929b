"""DualPipe and DualPipeV: forwards beside backwards of the other direction (DeepSeek, 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.phases import Phase, folded, from_phases
from superscaler_core.schedules.schedule import Schedule


def dualpipe(num_workers: int, num_microbatches: int) -> Schedule:
    """Two pipelines in opposite directions, in which forwards and backwards are pairs.

    Worker d of D holds stage d of the pipeline down, and stage D - 1 - d of the pipeline up, as in
    Chimera. The first half of the microbatches goes down, the second half up. In a pair the forward
    of one direction computes while the backward of the other communicates, and the reverse. For
    N >= 2 D a worker is idle for ``(D / 2 - 1)(F&B + B - 3 W)``, where F&B is the time of a pair.
    It holds the weights of two stages, and up to D + 1 microbatches.

    Raises:
        ScheduleError: D or N is odd.

    Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024; the steps of its public code.
    """
    require_counts("dualpipe", num_workers=num_workers, num_microbatches=num_microbatches)
    if num_workers % 2 or num_microbatches % 2:
        raise ScheduleError(
            f"dualpipe of {num_workers} workers and {num_microbatches} microbatches: both have to "
            "be even, because half of each pipeline's stages and microbatches go either way."
        )
    half = num_microbatches // 2
    down, up = range(half), range(half, num_microbatches)
    rows = []
    for worker in range(num_workers):
        # The second half of the workers mirrors the first half, with the directions exchanged.
        near = min(worker, num_workers - 1 - worker)
        first, second = (down, up) if near == worker else (up, down)
        ways = {"0": (near, first), "1": (num_workers - 1 - near, second)}
        rows.append((ways, _phases(near, num_workers // 2, half)))
    return from_phases("dualpipe", num_workers, num_microbatches, rows)


def dualpipe_v(num_workers: int, num_microbatches: int) -> Schedule:
    """DualPipe with one pipeline, folded into a V: worker d of D holds stages d and 2 D - 1 - d.

    Each worker has the row of a worker of ``dualpipe(2 * num_workers, 2 * num_microbatches)``. The
    microbatches that go up there are microbatches on their way back here, so the weights are held
    once. For N >= 2 D a worker is idle for ``(D - 1)(F&B + B - 3 W)``, with the times of one of its
    two stages; it holds up to 2 D + 1 microbatches of one stage.

    Raises:
        ScheduleError: a count is below 1.

    Source: Sea AI Lab, cut-in-half, 2025; the steps of DeepSeek's public code.
    """
    return folded(
        "dualpipe-v",
        num_workers,
        num_microbatches,
        lambda worker: _phases(worker, num_workers, num_microbatches),
    )


def _phases(near: int, num: int, num_microbatches: int) -> Iterator[Phase]:
    """The row of worker ``near`` of the ``num`` workers that way 0 passes until it becomes way 1.

    Worker 0 is where way 0 begins.
    """
    ahead = num - 1 - near
    yield 2 * ahead, "F0"
    yield near + 1, "F0 F1"
    yield ahead, "I1 W F1"
    # With fewer microbatches, the words for missing microbatches are left out.
    full = max(num_microbatches, 2 * num) - 2 * num + near + 1
    # Where way 0 turns into way 1, the first backward waits for the forward before it in the row.
    first = "F0&B1 F1&B0" if ahead else "F0 B1 F1&B0"
    yield from ((1, first), (full - 1, "F0&B1 F1&B0"))
    yield ahead, "B1 F1&B0"
    # The second half of the last backwards runs its W's later, while other workers still send.
    whole = [f"B{way}" for _ in range(near + 1) for way in "10"][: near + 1]
    halves = [f"I{way}" for _ in range(near + 1) for way in "10"][near + 1 :]
    yield 1, " ".join([*whole, *halves])
    yield ahead, "W I0"
    yield near + 1, "W"
