"""Proposals: the cuts of a stage planner as candidates of a search."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from superscaler_core.evaluation.request import Candidate, Request
from superscaler_core.plan import Keep, Plan
from superscaler_core.published.stages.fill import fill
from superscaler_core.published.stages.plan_stages import Planner, plan_stages
from superscaler_core.published.stages.pricing import price_stages

KEEPS = (Keep.EVERYTHING, Keep.BLOCK_INPUTS)
"""What blocks may keep for the backward in the stages that are priced."""

MAX_SAMPLES = 4
"""The largest microbatch that is tried, in samples per device: larger ones leave too few
microbatches to fill a pipeline."""


def propose_stages(request: Request, *, planner: Planner) -> Iterator[Candidate]:
    """A planner's cut for every size of microbatches and every value of ``KEEPS``."""
    name = getattr(planner, "__name__", "stages")
    for samples in request.samples:
        if samples > MAX_SAMPLES * len(request.devices):
            return
        for keep in KEEPS:
            text = f"{name} samples={samples}" + ("" if keep is KEEPS[0] else f" keep={keep}")
            how = partial(cut_by, request=request, planner=planner, samples=samples, keep=keep)
            yield Candidate(text, samples, how)


def cut_by(plan: Plan, *, request: Request, planner: Planner, samples: int, keep: Keep) -> None:
    """An sProgram: the stages that a planner chooses for a request.

    Raises:
        PlanError: the planner finds no cut that fits in memory.
    """
    blocks, vocabulary = plan.blocks, bool(plan.blocks.vocabulary)
    num = request.microbatches(samples)
    problem = price_stages(
        request.costs_of(plan.graph), plan.devices, num, memory_bytes=request.memory_bytes,
        keep=keep, has_changes=True, vocabulary=vocabulary, blocks=blocks,
    )  # fmt: skip
    cut, _ = plan_stages(
        plan.graph, problem, planner, request.topology, optimizer=request.optimizer,
        precision=request.precision, blocks=blocks, vocabulary=vocabulary, keep=keep,
    )  # fmt: skip
    fill(plan, cut=cut, microbatches=num, vocabulary=vocabulary, keep=keep)
