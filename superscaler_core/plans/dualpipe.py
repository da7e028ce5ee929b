"""DualPipe: two pipelines in opposite directions, in pairs of a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import dualpipe as order


def dualpipe(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 0,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """The stages of ``chimera``, in an order that pairs every forward with a backward.

    Communication is that of ``chimera``; with ``Overlap(pairs=True)``, one action of a pair
    computes while the other communicates inside its stage. Memory per group: 2/``pp`` of the
    weights; activations of up to ``pp`` + 1 microbatches of a stage.

    Args:
        plan: to fill.
        pp: groups of devices, an even number.
        microbatches: an even number, best ``2 * pp`` or more; 0 means ``2 * pp``.
        tp, zero1, sizes: as in ``one_f_one_b``.

    Raises:
        ScheduleError: ``pp`` or ``microbatches`` is odd.

    Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches or 2 * num), tp, zero1=zero1, sizes=sizes)
