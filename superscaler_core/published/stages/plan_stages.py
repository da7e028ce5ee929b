"""Plan stages: a planner's cut as a program that fits in memory, according to the memory reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import rvdcomm as rv
from superscaler_core.compiled import Compiled, compile
from superscaler_core.graph.blocks import Blocks
from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Plan
from superscaler_core.precision import Precision
from superscaler_core.published.stages.alpa import alpa
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.dapple import dapple
from superscaler_core.published.stages.fill import fill
from superscaler_core.published.stages.galvatron import galvatron
from superscaler_core.published.stages.pipedream import pipedream, pipedream_hierarchical
from superscaler_core.published.stages.piper import piper
from superscaler_core.published.stages.problem import StageProblem
from superscaler_core.published.stages.tarnawski import tarnawski

Planner = Callable[[StageProblem], StageCut]

STAGE_PLANNERS: Mapping[str, Planner] = {
    "pipedream": pipedream,
    "pipedream_hierarchical": pipedream_hierarchical,
    "dapple": dapple,
    "piper": piper,
    "tarnawski": tarnawski,
    "alpa": alpa,
    "galvatron": galvatron,
}
"""Planners whose cuts are pipelines, by name."""


def plan_stages(
    graph: Graph,
    problem: StageProblem,
    planner: Planner,
    topology: rv.Topology,
    *,
    optimizer: str = "adam",
    precision: Precision = Precision(),
    blocks: Blocks | None = None,
    **options: Any,
) -> tuple[StageCut, Compiled]:
    """Let a planner cut a model, and compile the plan; its program fits in the problem's memory.

    The problem's memory of a stage is a sum over layers. A program also holds tensors that arrive
    for a stage, or wait to leave it. So if the memory reader finds more than a device has, the
    planner is asked again with a lower limit, until its cut fits or it finds none.

    Args:
        graph: the model of the problem.
        problem: the stage problem of the model, as from ``price_stages``.
        planner: one of ``STAGE_PLANNERS``.
        topology: the topology of the devices.
        optimizer, precision: as in ``compile``.
        blocks: the blocks of the graph; found by its structure if None.
        options: options of ``fill``.

    Raises:
        PlanError: the planner finds no cut, or none that fits.
    """
    asked = problem
    while True:
        cut = planner(asked)
        peak: float = _most_bytes(problem, cut)
        # A planner with a memory rule of its own (PipeDream's hosts) may return too large a cut.
        if peak <= problem.memory_bytes:
            plan = Plan(graph, sorted(device for stage in cut.stages for device in stage.devices))
            plan.blocks = blocks or plan.blocks
            fill(plan, cut=cut, microbatches=problem.microbatches, **options)
            made = compile(plan, topology=topology, optimizer=optimizer, precision=precision)
            peak = max(memory.total_bytes for memory in made.memory.values())
            if peak <= problem.memory_bytes:
                return cut, made
        less = max(STEP * asked.memory_bytes, asked.memory_bytes - (peak - problem.memory_bytes))
        asked = replace(asked, memory_bytes=min(less, _most_bytes(problem, cut) * (1 - 1e-6)))


STEP = 0.85
"""The next memory limit is at least this share of the last one, unless the last cut needs less than
that: a much lower limit would miss cuts that fit."""


def _most_bytes(problem: StageProblem, cut: StageCut) -> float:
    """Bytes on a device of the cut's fullest stage, by the problem's sum over layers."""
    last = len(cut.stages) - 1
    return max(problem.stage_bytes(stage, last - i) for i, stage in enumerate(cut.stages))
