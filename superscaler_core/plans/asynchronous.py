"""Asynchronous pipelines: updates between microbatches instead of a flush after every step.

A step of such a plan is a run of the pipeline from fill to drain. ``Trainer.update_with`` tells it
how to make its optimizers. A weight that several stages read, such as that of tied embeddings, has
the versions and the delay of the first of these stages (docs/asynchronous.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core import schedules
from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers


def pipedream(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 16,
    every: int = 1,
    vertical: bool = False,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """One stage per group of devices, which stashes the weight versions that are still read.

    Memory per group: 1/``pp`` of the weights, in ``pp - s`` versions on stage s (in ``pp`` versions
    if ``vertical``); activations of ``pp - s`` microbatches.

    Args:
        plan: to fill.
        pp: groups of devices; if 0, as many as there are groups of ``tp`` devices.
        microbatches: number per run, each as large as the captured batch.
        every: microbatches per update.
        vertical: whether all stages read the version that stage 0 read (vertical sync).
        tp, zero1, sizes: as in ``one_f_one_b``.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices.
        ScheduleError: ``every`` does not divide the microbatches.

    Source: Narayanan et al., PipeDream, SOSP 2019.
    """
    num = num_workers(plan, pp, tp)
    order = schedules.pipedream(num, microbatches, every=every, vertical=vertical)
    grid_stages(plan, order, tp, zero1=zero1, sizes=sizes)


def pipedream_2bw(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 16,
    every: int = 0,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Like ``pipedream``, with two versions on all stages; gradients are one update late.

    Args and errors are those of ``pipedream``; ``every`` is at least ``pp``, and ``pp`` if 0.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021.
    """
    num = num_workers(plan, pp, tp)
    order = schedules.pipedream_2bw(num, microbatches, every=every)
    grid_stages(plan, order, tp, zero1=zero1, sizes=sizes)


def ampnet(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 16,
    every: int = 1,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Like ``pipedream``, with only the newest version of weights, which backwards read, too.

    Args and errors are those of ``pipedream``.

    Source: Gaunt et al., AMPNet, 2017.
    """
    num = num_workers(plan, pp, tp)
    order = schedules.ampnet(num, microbatches, every=every)
    grid_stages(plan, order, tp, zero1=zero1, sizes=sizes)


def pipemare(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 16,
    every: int = 1,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Like ``ampnet``, with ``2 (pp - 1 - s) + 1`` microbatches in flight on stage s.

    Args and errors are those of ``pipedream``. ``PipeMare`` has the corrections for the delay.

    Source: Yang et al., PipeMare, MLSys 2021.
    """
    num = num_workers(plan, pp, tp)
    order = schedules.pipemare(num, microbatches, every=every)
    grid_stages(plan, order, tp, zero1=zero1, sizes=sizes)
