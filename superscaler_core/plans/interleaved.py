"""Interleaved 1F1B: several stages per group, which shortens the idle time at both ends."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import interleaved as order


def interleaved(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 8,
    chunks: int = 2,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Deal stages of blocks out to the groups in turn, ``chunks`` to each.

    A microbatch sends the hidden state ``chunks`` times as often as under ``one_f_one_b``, and
    devices are idle for 1/``chunks`` as long. Memory per group: 1/``pp`` of the weights;
    activations of 1 + (``pp`` - 1)/(``pp`` * ``chunks``) times what 1F1B holds on its first stage.

    Args:
        plan: to fill.
        chunks: stages per group.
        pp, tp, microbatches, zero1, sizes: as in ``one_f_one_b``.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches, chunks), tp, zero1=zero1, sizes=sizes)
