"""Expert parallel: every device has a share of the batch and some of the experts."""

from __future__ import annotations

from math import gcd

from superscaler_core.errors import PlanError
from superscaler_core.plan import Axis, Plan
from superscaler_core.plans.cuts import spread_all

EXPERTS = "*.experts"


def expert_parallel(plan: Plan, *, ep: int = 0, experts: str = EXPERTS) -> None:
    """Cut the experts' ops by expert, and all others along the batch.

    A microbatch has two all-to-alls forward and two backward in every layer of experts; a step
    all-reduces the gradients of other weights. Memory a device: 1/``ep`` of the experts' weights,
    all of the others; 1/N of the activations.

    Args:
        plan: to fill.
        ep: devices among which the experts are dealt out; as many as divide both devices and
            experts if 0. With fewer than all devices the experts are data parallel besides.
        experts: pattern of the module path of the experts, whose parameters have them as dim 0.

    Raises:
        PlanError: there are no experts, or ``ep`` does not divide the devices or the experts.

    Source: Lepikhin et al., GShard, 2020.
    """
    inside = set(plan.graph.ops_in(experts))
    weights = [tensor for op in plan.graph.ops if op in inside for tensor in op.parameters]
    if not weights:
        raise PlanError(
            f"{plan.graph.name} has no parameters in modules {experts!r}; expert_parallel is for "
            "mixtures of experts: say experts=... if they are named otherwise."
        )
    num, num_experts = len(plan.devices), weights[0].shape[0]
    ep = ep or gcd(num, num_experts)
    if num % ep or num_experts % ep:
        raise PlanError(
            f"{num_experts} experts on ep={ep} of {num} devices: ep has to divide both; use "
            f"{gcd(num, num_experts)} or a divisor of it."
        )
    batch = (plan.dims.batch,)
    expert = tuple(sorted({plan.dims.of(weight.name, 0) for weight in weights}))
    others = [op for op in plan.graph.ops if op not in inside]
    spread_all(plan, [Axis(num // ep, batch), Axis(ep, batch)], others, plan.devices)
    spread_all(
        plan, [Axis(num // ep, batch), Axis(ep, expert)], plan.graph.ops_in(experts), plan.devices
    )
