"""Dynamic axial parallelism: every module of an Evoformer is cut along a dim it does not mix."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.pieces.along import shares
from superscaler_core.plans.pieces.axial import EVOFORMER, Cut, spread_axially


def dap(
    plan: Plan,
    *,
    dp: int = 1,
    modules: Sequence[Cut] = EVOFORMER,
    keep: Keep = Keep.EVERYTHING,
) -> None:
    """Cut alignment and pairs along rows or columns, whichever a module treats independently.

    A block has 6 all-to-alls forward, where rows become columns or back (2 of the alignment, 4 of
    the pairs), and 6 all-gathers, of 3 operands of products and 3 biases; backward 6 all-to-alls
    and 6 reduce-scatters. A step all-reduces the gradients of weights. Memory per device: all
    weights, 1/N of the activations except what is gathered.

    Args:
        plan: to fill.
        dp: groups of devices among which the batch is cut.
        modules: the dim along which each module is cut.
        keep: which values of the blocks are kept for the backward.

    Raises:
        PlanError: ``dp`` does not divide the devices, a dim is too small, or there are no such
            modules.

    Source: Cheng et al., FastFold, 2022.
    """
    shares(plan, dp=dp)
    spread_axially(plan, plan.graph.ops, plan.devices, dp, modules)
    plan.keep(keep)
