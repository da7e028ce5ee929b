"""Recipes: ways to plan a pair, under names that mean the same for tensors of other sizes.

Tuning remembers a recipe and not a plan, so that all tensors of about one size share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rvdcomm import Path, Plan, Topology, plan
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.planning import candidate_paths, direct_path

MODEL = "model"
"""The recipe of ``rvdcomm.plan``: the plan that the cost model chooses."""

MAX_OTHERS = 8
"""Candidates of an irregular pair that are priced; ``candidate_paths`` names about 20 at most."""

MAX_PLANS = 4
"""Plans that are measured: the model's choice, and the next best by their predicted time."""


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
    """The plan of a recipe; the model's choice for an unknown recipe, or one that does not fit."""
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
    # A plan without host levels has fewer steps, which is faster where messages are expensive.
    yield "flat", plan(src, dst, model.dtype, Topology(model.topology.levels[:1])).path
    yield "direct", direct_path(src, dst)
    paths = candidate_paths(src, dst, ITEM_BYTES[model.dtype], model.topology)
    for i, path in enumerate(islice(paths, MAX_OTHERS)):
        yield f"candidate {i}", path
