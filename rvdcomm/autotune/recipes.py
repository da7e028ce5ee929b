"""Recipes: ways to plan a pair, by names that mean the same for tensors of other sizes.

What is remembered is a recipe and not a plan, so that all tensors of about one size share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rvdcomm.layout import ITEM_BYTES, Topology
from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.path import Path
from rvdcomm.plans.planner import Plan, plan

MODEL = "model"
"""The recipe of ``rvdcomm.plan``: what the cost model likes best."""

MAX_OTHERS = 8
"""Candidates of an irregular pair that are looked at; ``candidate_paths`` names at most some 20."""

MAX_PLANS = 4
"""That are measured: the model's choice, and the next best by its own price."""


@dataclass(frozen=True)
class Tuned:
    """What is fastest: ``secs`` a call on the slowest rank, and what the model's choice takes.

    ``measured`` says whether this call measured it or found it known.
    """

    plan: Plan
    executor: str
    recipe: str
    secs: float
    model_secs: float
    measured: bool


def recipes(model: Plan, memory_limit: int | None) -> dict[str, Plan]:
    """The best few different plans by their recipes, the model's choice first."""
    different = {str(model.path): (MODEL, model)}
    for name, path in _others(model):
        different.setdefault(str(path), (name, Plan(path, model.dtype, model.topology)))
    first, *others = different.values()
    # Sorted is stable: plans that cost the same stay in the order in which they are named.
    fitting = sorted((o for o in others if _fits(o[1], memory_limit)), key=lambda o: o[1].cost.secs)
    return dict([first, *fitting[: MAX_PLANS - 1]])


def plan_of(recipe: str, model: Plan, memory_limit: int | None) -> Plan:
    """The plan of a recipe; the model's choice where there is no such, or it does not fit."""
    for name, path in _others(model):
        if name == recipe:
            found = Plan(path, model.dtype, model.topology)
            return found if _fits(found, memory_limit) else model
    return model


def _fits(made: Plan, memory_limit: int | None) -> bool:
    return memory_limit is None or made.cost.peak_bytes <= memory_limit


def _others(model: Plan) -> Iterator[tuple[str, Path]]:
    """Paths besides the model's choice."""
    src, dst = model.src, model.dst
    if src == dst:
        return
    # Without hosts there are fewer steps, which pays where messages are dear.
    yield "flat", plan(src, dst, model.dtype, Topology(model.topology.levels[:1])).path
    yield "direct", direct_path(src, dst)
    paths = candidate_paths(src, dst, ITEM_BYTES[model.dtype], model.topology)
    for i, path in enumerate(islice(paths, MAX_OTHERS)):
        yield f"candidate {i}", path
