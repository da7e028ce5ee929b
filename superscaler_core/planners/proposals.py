"""Proposals: what a planner of a space chooses, as candidates of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from superscaler_core.evaluation.request import Candidate, Request, Trial
from superscaler_core.plan import Plan
from superscaler_core.space.choices import MeshSizes
from superscaler_core.space.priced import price_space
from superscaler_core.space.space import Solution, Space

SpacePlanner = Callable[[Space], Solution]

LESS = 0.8
"""A planner is asked again with at least this share of the last memory limit, at most twice."""


def propose_space(request: Request, *, planner: SpacePlanner) -> Iterator[Candidate]:
    """A planner's assignment for every size of microbatches, large ones first, on two meshes.

    The memory of a space is a sum over ops. If the memory reader finds that the program needs more
    memory than there is, the planner is asked again with a lower limit.
    """
    for samples in reversed(request.samples):
        for mesh in _meshes(len(request.devices)):
            yield _candidate(request, planner, samples, mesh, request.memory_bytes, 2)


def _meshes(num: int) -> Iterator[MeshSizes | None]:
    """None (hosts times devices of a host), and a mesh of two axes as square as possible."""
    yield None
    side = next(side for side in range(int(num**0.5), 0, -1) if num % side == 0)
    if side > 1:
        yield num // side, side


def _candidate(
    request: Request,
    planner: SpacePlanner,
    samples: int,
    mesh: MeshSizes | None,
    memory: float,
    again: int,
) -> Candidate:
    name = getattr(planner, "__name__", "space")
    words = [f"{name} samples={samples}"]
    words += [f"mesh={'x'.join(map(str, mesh))}"] if mesh else []
    words += (
        [f"memory={memory / request.memory_bytes:.2f}"] if memory < request.memory_bytes else []
    )
    how = partial(
        cut_by, request=request, planner=planner, samples=samples, mesh=mesh, memory_bytes=memory
    )

    def follow(trial: Trial) -> Iterator[Candidate]:
        if trial.lacks_memory and again:
            excess = trial.peak_bytes - request.memory_bytes
            less = max(LESS * memory, memory - excess) * (1 - 1e-6)
            yield _candidate(request, planner, samples, mesh, less, again - 1)

    return Candidate(" ".join(words), samples, how, follow=follow)


def cut_by(
    plan: Plan,
    *,
    request: Request,
    planner: SpacePlanner,
    samples: int,
    mesh: MeshSizes | None,
    memory_bytes: float,
) -> None:
    """An sProgram: the cuts that a planner chooses for a request.

    Raises:
        PlanError: the planner finds no assignment that fits in memory.
    """
    priced = price_space(
        request.costs_of(plan.graph), plan.devices, mesh=mesh,
        microbatches=request.microbatches(samples), memory_bytes=memory_bytes, blocks=plan.blocks,
    )  # fmt: skip
    priced.fill(plan, planner(priced.space).assignment)
