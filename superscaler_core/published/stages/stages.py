"""Stages: an sProgram whose stages a planner chooses."""

from __future__ import annotations

from typing import Any

import rvdcomm as rv
from superscaler_core.cost import PROFILES, CostModel, DeviceProfile
from superscaler_core.plan import Keep, Plan
from superscaler_core.plans import plan_row
from superscaler_core.plans.row import OptionReader
from superscaler_core.published.stages.alpa import alpa
from superscaler_core.published.stages.fill import fill
from superscaler_core.published.stages.plan_stages import STAGE_PLANNERS, Planner, plan_stages
from superscaler_core.published.stages.pricing import price_stages


@plan_row(readers={"planner": OptionReader.named(STAGE_PLANNERS)}, is_proposed=False)
def stages(
    plan: Plan,
    *,
    planner: Planner = alpa,
    microbatches: int = 8,
    profile: DeviceProfile = PROFILES["v100"],
    topology: rv.Topology | None = None,
    memory_bytes: int | None = None,
    vocabulary: bool = False,
    keep: Keep = Keep.EVERYTHING,
) -> None:
    """Cut a model into stages by a planner; devices that the planner does not use stay idle.

    Args:
        plan: to fill.
        planner: one of ``STAGE_PLANNERS``.
        microbatches: microbatches in a step, each as large as the captured one; replicas share it.
        profile: the profile of every device.
        topology: a topology with the plan's devices; one host with NVLink if None.
        memory_bytes: memory of a device; that of the profile if None.
        vocabulary: as in ``tensor_parallel``.
        keep: what blocks keep for the backward: everything or block inputs.

    Raises:
        PlanError: the planner finds no cut that fits in memory.
    """
    cluster = topology or rv.Topology.single_host(max(plan.devices) + 1, 5e-6, 200e9)
    problem = price_stages(
        CostModel(plan.graph, profile, cluster), plan.devices, microbatches,
        memory_bytes=memory_bytes, keep=keep, has_changes=True, vocabulary=vocabulary,
        blocks=plan.blocks,
    )  # fmt: skip
    how: dict[str, Any] = {"vocabulary": vocabulary, "keep": keep}
    cut, _ = plan_stages(plan.graph, problem, planner, cluster, blocks=plan.blocks, **how)
    fill(plan, cut=cut, microbatches=microbatches, **how)
