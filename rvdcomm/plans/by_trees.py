"""Plans by trees: where paths of primitives are far from the bound, trees may be nearer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rvdcomm.cost import total_cost
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.network import Network
from rvdcomm.planning.estimate import MAX_COUNTED_RANKS
from rvdcomm.planning.path import Path, State, Step
from rvdcomm.plans.plan import Plan
from rvdcomm.synthesis import (
    MAX_PACKED_RANKS,
    MAX_QUICK_RANKS,
    MAX_RANKS,
    Forest,
    bare_forest,
    forests,
    is_packed,
    quick_forest,
    relayed_forests,
)

NEAR = 1.05
"""No trees are tried for a plan that takes at most so many times as long as the bound."""

MAX_LATENCY_SHARE = 0.5
"""If the latency of messages is a larger share of the time, trees have to save rounds."""

GOOD = 1.02
"""The first forest that takes at most so many times as long as the bound is taken."""

MAX_LOWERED_RANKS = 16
"""Paths among so many ranks of a network are lowered to know their time."""

MIN_GAIN = 0.98
"""Trees have to take at most this share of the time of the path."""

MIN_QUICK_GAIN = 0.6
"""The same for few rounds on levels: messages to several ranks overlap more than the model says."""


def faster_by_trees(plan: Plan) -> Plan:
    """``plan``, or a plan by trees between the same layouts that is faster."""
    num_ranks = len(plan.path.ranks)
    if plan.dst.rvd.v > 1 or plan.src == plan.dst or num_ranks > MAX_QUICK_RANKS:
        return plan
    # Slices do not overlap on one level, and there are none among many ranks.
    is_unsliced = num_ranks > MAX_COUNTED_RANKS or len(plan.topology.levels) == 1
    if is_unsliced and plan.modelled is not None and plan.modelled.is_exact:
        secs, latency = plan.modelled.cost.secs, plan.modelled.latency_secs
    elif num_ranks > MAX_COUNTED_RANKS:
        return plan
    else:
        secs, latency = _secs(plan), sum(cost.latency_secs for cost in plan.exchange_costs)
    item_bytes = ITEM_BYTES[plan.dtype]
    # Of the path as it runs in slices; latencies of all rounds are paid once.
    overlaps = plan.network is None and latency > MAX_LATENCY_SHARE * secs
    least = secs * (MIN_QUICK_GAIN if overlaps else MIN_GAIN)
    found: Plan | None = None
    for forest in _candidates(plan, secs, latency):
        made = _with_forest(plan, forest)
        if made.beats is None or not forest.demands:
            break
        secs = made.beats.secs(made.num_slices, item_bytes)
        # Where pieces are small, the program says how uneven they are.
        if secs < least and (made.evenness >= 1 or _is_faster(made, plan)):
            least, found = secs, made
        if secs <= GOOD * plan.bound.secs:
            break
    return found or plan


def _candidates(plan: Plan, secs: float, latency: float) -> Iterator[Forest]:
    """Forests of few rounds, or of few bytes, by what the time of a plan is made of.

    On a network of few ranks both are tried, since messages that ranks pass on are few bytes, too.
    """
    request = plan.src, plan.dst, Network.of(plan.links)
    num_ranks = len(plan.path.ranks)
    has_few_bytes = latency > MAX_LATENCY_SHARE * secs
    if has_few_bytes and plan.network is not None:
        yield from relayed_forests(*request)
        if num_ranks > MAX_PACKED_RANKS:
            return
    elif has_few_bytes:
        # Reading memory has no rounds.
        quick = None if plan.domains else quick_forest(*request)
        if quick is not None:
            yield quick
        return
    if num_ranks <= MAX_RANKS and secs > NEAR * plan.bound.secs:
        yield from forests(*request)


def _secs(plan: Plan) -> float:
    """The time of a path; where wires are few, what readers of shared memory do counts too."""
    if plan.network is not None and len(plan.path.ranks) <= MAX_LOWERED_RANKS:
        return plan.cost.secs
    return total_cost(plan.exchange_costs, 0, plan.num_slices).secs


def _with_forest(plan: Plan, forest: Forest) -> Plan:
    path = Path(plan.src, plan.dst, (Step("trees", State(plan.src), State(plan.dst), direct=True),))
    return replace(plan, path=path, near=None, slices=None, forest=forest)


def _is_faster(made: Plan, plan: Plan) -> bool:
    return made.keeps_routes and made.cost.secs < plan.cost.secs


def may_differ(plan: Plan) -> bool:
    """Whether machines may find different trees for this plan, or none."""
    return plan.network is not None and is_packed(plan.src, plan.dst, plan.network)


def with_ways(plan: Plan, ways: Any) -> Plan:
    """``plan`` with the trees of another rank (``Forest.to_json``).

    Raises:
        LayoutError: they do not serve the layouts of the plan.
    """
    network = Network.of(plan.links)
    forest = bare_forest(plan.src, plan.dst, network).with_ways(ways)
    return _with_forest(plan, forest)
