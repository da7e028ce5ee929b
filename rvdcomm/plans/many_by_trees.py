"""Many by trees: bundles in which tensors go along trees where that is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rvdcomm.errors import LayoutError, MemoryLimitError
from rvdcomm.plans.bundle import Bundle, fitting
from rvdcomm.plans.by_trees import MIN_GAIN, may_differ
from rvdcomm.plans.member import TensorPlan
from rvdcomm.plans.path_tensor import PathTensor
from rvdcomm.plans.plan import Plan
from rvdcomm.plans.planner import plan, with_trees
from rvdcomm.plans.tree_tensor import TreeTensor


def faster_by_trees(bundle: Bundle) -> Bundle:
    """The bundle, whose tensors go along paths, or one in which some go along trees instead.

    That one is taken if it is faster and fits the memory limit.

    Raises:
        MemoryLimitError: none fits; the message names the least peak of those tried.
    """
    found = {one: _along(one, _tried(one)) for one in _tensor_plans(bundle) if _may_go(one)}
    if not any(isinstance(one, TreeTensor) for one in found.values()):
        return fitting(bundle)
    with suppress(MemoryLimitError):
        by_trees = fitting(_with(bundle, found))
        try:
            by_paths = fitting(bundle)
        except MemoryLimitError:
            return by_trees
        is_faster = by_trees.modelled_secs < MIN_GAIN * by_paths.modelled_secs
        return by_trees if is_faster else by_paths
    return fitting(bundle)


def _tensor_plans(bundle: Bundle) -> list[TensorPlan]:
    """The ways of all tensors, each once, in the order of the members."""
    return list(dict.fromkeys(member.tensor_plan for member in bundle.members))


def _may_go(one: TensorPlan) -> bool:
    """Whether a tensor may go along trees: sums are made where they stay, so in one dtype."""
    transition = one.transition
    return transition.src.rvd.v == 1 or transition.src_dtype == transition.dst_dtype


def _tried(one: TensorPlan) -> Plan:
    made = one.plan
    return plan(made.src, made.dst, made.dtype, made.links, executor=made.executor)


def _along(one: TensorPlan, made: Plan) -> TensorPlan:
    """The same tensor by another plan."""
    kind = PathTensor if made.forest is None else TreeTensor
    return kind(replace(one.transition, view=made.path.view), made)


def _with(bundle: Bundle, found: Mapping[TensorPlan, TensorPlan]) -> Bundle:
    members = (
        replace(m, tensor_plan=found.get(m.tensor_plan, m.tensor_plan)) for m in bundle.members
    )
    return replace(bundle, members=tuple(members))


# --- agreement ----------------------------------------------------------------------------------


def trees_of(bundle: Bundle) -> list[Any] | None:
    """The trees of each way as plain values, None for a path; None if all machines find the same.

    Machines may find different trees, or none, for a network of few ranks (``may_differ``).
    """
    mine = _tensor_plans(bundle)
    if not any(may_differ(one.plan) for one in mine):
        return None
    return [None if one.plan.forest is None else one.plan.forest.to_json() for one in mine]


def with_trees_of(bundle: Bundle, ways: Sequence[Any]) -> Bundle:
    """The bundle with the trees of another rank (``trees_of``).

    Raises:
        LayoutError: they do not serve the layouts.
        MemoryLimitError: the changed bundle does not fit the limit.
    """
    mine = _tensor_plans(bundle)
    if len(ways) != len(mine):
        raise LayoutError(f"trees of another rank are for {len(ways)} pairs, not {len(mine)}.")
    found = {
        one: _along(one, with_trees(one.plan, theirs))
        for one, theirs in zip(mine, ways, strict=True)
        if theirs != (None if one.plan.forest is None else one.plan.forest.to_json())
    }
    return fitting(_with(bundle, found))
