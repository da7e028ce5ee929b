"""DualPipeV: DualPipe on one pipeline that is folded into a V, so weights are held once."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import dualpipe_v as order


def dualpipe_v(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 0,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """The stages of ``zero_bubble_v``, in an order that pairs every forward with a backward.

    Communication is that of ``zero_bubble_v``; with ``Overlap(pairs=True)``, one action of a pair
    computes while the other communicates inside its stage. Memory per group: 1/``pp`` of the
    weights; activations of up to ``2 pp + 1`` microbatches of one of the ``2 pp`` stages.

    Args:
        plan: to fill.
        microbatches: best ``2 * pp`` or more; 0 means ``2 * pp``.
        pp, tp, zero1, sizes: as in ``one_f_one_b``.

    Source: Sea AI Lab, cut-in-half, 2025; DeepSeek's public code.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches or 2 * num), tp, zero1=zero1, sizes=sizes)
