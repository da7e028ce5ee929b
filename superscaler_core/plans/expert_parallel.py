"""Expert parallel: every device has a share of the batch and some of the experts."""

from __future__ import annotations

from math import gcd

from superscaler_core.errors import PlanError
from superscaler_core.plan import Axis, Plan
from superscaler_core.plans.pieces.along import spread


def expert_parallel(plan: Plan, *, ep: int = 0) -> None:
    """Cut the experts' ops by expert, and all others along the batch.

    A microbatch has two all-to-alls forward and two backward in every layer of experts; a step
    all-reduces the gradients of other weights. Memory per device: 1/``ep`` of the experts' weights,
    all of the others; 1/N of the activations.

    Args:
        plan: to fill.
        ep: devices among which the experts are dealt out; if 0, the most that divide both devices
            and experts. If it is less than all devices, groups of ``ep`` are data parallel.

    Raises:
        PlanError: there are no experts, or ``ep`` does not divide the devices or the experts.

    Source: Lepikhin et al., GShard, 2020.
    """
    experts, dims = plan.blocks.experts, plan.blocks.expert_dims
    num, num_experts = len(plan.devices), gcd(*(n for d in dims for n in plan.dims.sizes(d)))
    if not ep and num > 1 and gcd(num, num_experts) == 1:
        raise PlanError(
            f"{num_experts} experts cannot be dealt out evenly to {num} devices: use "
            "zero3:experts=true, which cuts them unevenly, or another number of devices."
        )
    ep = ep or gcd(num, num_experts)
    if num % ep or num_experts % ep:
        raise PlanError(
            f"{num_experts} experts on ep={ep} of {num} devices: ep has to divide both; use "
            f"{gcd(num, num_experts)} or a divisor of it."
        )
    batch = (plan.dims.batch,)
    for op in plan.graph.ops:
        inside = Axis(ep, dims if op in experts else batch)
        spread(plan, [op], plan.devices, Axis(num // ep, batch), inside)
