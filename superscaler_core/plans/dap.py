"""Dynamic axial parallelism: every module of an Evoformer is cut along what it does not mix."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.plan import Plan
from superscaler_core.plans.axial import EVOFORMER, spread_axially
from superscaler_core.plans.blocks import BLOCK, blocks_of
from superscaler_core.plans.storage import shard_storage


def dap(
    plan: Plan,
    *,
    dp: int = 1,
    modules: str = EVOFORMER,
    zero1: bool = False,
    recompute: bool = False,
    block: str = BLOCK,
) -> None:
    """Cut rows or columns of alignment and pairs, whichever a module treats alike.

    A block has 6 all-to-alls forward, where rows become columns or back (2 of the alignment, 4 of
    the pairs), and 6 all-gathers, of 3 operands of products and 3 biases; backward 6 all-to-alls
    and 6 reduce-scatters. A step all-reduces the gradients of weights. Memory a device: all
    weights, 1/N of the activations but for what is gathered.

    Args:
        plan: to fill.
        dp: groups of devices among which the batch is cut.
        modules: what is cut how, as of ``axial.axial_loops``.
        zero1: cut master weights and states among the devices that read the same, which are all.
        recompute: keep of every block only what enters it, and run it again in the backward, its
            communication too.
        block: pattern of the blocks' module paths.

    Raises:
        PlanError: ``dp`` does not divide the devices, a dim is too small, or there are no such
            modules.

    Source: Cheng et al., FastFold, 2022.
    """
    num = len(plan.devices)
    if dp < 1 or num % dp:
        raise PlanError(f"dap in dp={dp} groups of {num} devices: dp has to divide {num}.")
    spread_axially(plan, plan.graph.ops, plan.devices, num // dp, modules)
    if zero1:
        shard_storage(plan)
    if recompute:
        plan.rerun(*blocks_of(plan.graph, block))
