"""Planner: ``plan`` picks a low-cost candidate that fits its memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from rvdcomm.errors import LayoutError, MemoryLimitError
from rvdcomm.layout import ITEM_BYTES, Layout, check_summable, dtype_name
from rvdcomm.network import DEFAULT_LINK, Level, Links, Network, Topology, check_links
from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.estimate import Estimator
from rvdcomm.planning.path import Path
from rvdcomm.planning.pipeline import NUM_SLICES
from rvdcomm.plans.by_trees import faster_by_trees, with_ways
from rvdcomm.plans.plan import (
    EXECUTORS,
    Plan,
    slice_counts,
)
from rvdcomm.program import SharedDomains
from rvdcomm.text import MAX_INTEGER, quoted

WINDOW_COUNTS = (2, 4, 8, 16, 32, 64)
"""Windows that a direct exchange may be cut into to stay below a memory limit."""

MAX_CACHED_PLANS = 4096


def plan(
    src: Layout,
    dst: Layout,
    dtype: Any = "float32",
    topology: Links | None = None,
    memory_limit: int | None = None,
    *,
    executor: str = "auto",
    trees: bool = True,
) -> Plan:
    """A low-cost plan from ``src`` to ``dst``; the same arguments give the same object.

    Args:
        src, dst: layouts of one global shape, over any ranks.
        dtype: a name, a numpy dtype or a torch dtype.
        topology: hosts and links, or a network; one host with a port for every rank if None.
        memory_limit: the most bytes that a rank's buffers may take, src and dst shards included.
        executor: one of ``EXECUTORS``: whether ranks of one host read each other's memory.
        trees: whether trees may be tried where paths of primitives are far from the bound, which
            takes up to seconds.

    Raises:
        LayoutError: the shapes differ, the dtype has no sum but a layout has V > 1, a rank is not
            in the topology, there is no such executor, or the shards of all ranks together take
            2^63 bytes or more.
        MemoryLimitError: no plan fits; the message names the least memory that a plan needs.
    """
    return _plan_as_given(src, dst, dtype, topology, memory_limit, executor, trees)


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _plan_as_given(
    src: Layout,
    dst: Layout,
    dtype: Any,
    topology: Links | None,
    memory_limit: int | None,
    executor: str,
    trees: bool,
) -> Plan:
    """Plans, cached by the arguments as the caller writes them: a cache hit checks nothing."""
    name = dtype_name(dtype)
    check_executor(executor)
    if src.shape != dst.shape:
        raise LayoutError(f"src {src} and dst {dst} differ in shape: {src.shape} and {dst.shape}.")
    check_summable(name, [src, dst])
    for layout in (src, dst):
        _check_size(layout, name)
    if topology is None:
        topology = default_topology((*src.ranks, *dst.ranks))
    check_links(topology)
    for layout in (src, dst):
        topology.check_ranks(layout.span or layout.ranks)
    if isinstance(topology, Network):
        topology = topology.levels or topology
    return _cached_plan(src, dst, name, topology, memory_limit, executor, trees)


def _check_size(layout: Layout, dtype: str) -> None:
    """Raise a LayoutError if the shards of all ranks together are too large to be counted."""
    num_bytes = layout.rvd.r * layout.rvd.v * prod(layout.shape) * ITEM_BYTES[dtype]
    if num_bytes > MAX_INTEGER:
        raise LayoutError(
            f"the shards of {layout} {dtype} take {num_bytes} bytes on all ranks together; at most "
            f"{MAX_INTEGER} are counted."
        )


def check_executor(name: str) -> None:
    """Raise a LayoutError if there is no executor of this name."""
    if name not in EXECUTORS:
        raise LayoutError(f"executor {quoted(name)} is unknown; use one of {', '.join(EXECUTORS)}.")


def plan_with(made: Plan, *, executor: str | None = None, memory_limit: int | None = None) -> Plan:
    """``made``, changed to another executor or memory limit if one is given.

    Raises:
        MemoryLimitError: no plan fits the limit.
    """
    executor = executor or made.executor
    memory_limit = made.memory_limit if memory_limit is None else memory_limit
    if (executor, memory_limit) == (made.executor, made.memory_limit):
        return made
    if memory_limit == made.memory_limit:
        # The path is kept, since it may not come from the search.
        near = None if executor != made.executor else made.near
        return _fitting(replace(made, executor=executor, near=near, slices=None), [made.path])
    request = made.src, made.dst, made.dtype, made.links, memory_limit
    return _cached_plan(*request, executor, made.forest is not None)


def plan_over(made: Plan, domains: SharedDomains) -> Plan:
    """``made``, changed to other shared-memory domains (``domains``).

    Raises:
        MemoryLimitError: no plan fits the limit of ``made``.
    """
    near = tuple(group for group in domains if len(group) > 1)
    if near == made.domains or (not made.domains and made.memory_limit is not None):
        return made
    return _fitting(replace(made, near=near, slices=None), [made.path])


def default_topology(ranks: Iterable[int]) -> Topology:
    """One host that holds these ranks."""
    ports = tuple((rank,) for rank in sorted(set(ranks)))
    return Topology((Level("rank", ports, DEFAULT_LINK),))


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _cached_plan(
    src: Layout,
    dst: Layout,
    dtype: str,
    links: Links,
    memory_limit: int | None,
    executor: str,
    trees: bool,
) -> Plan:
    """Plans, cached by arguments that are checked and have their defaults filled in."""
    network = links if isinstance(links, Network) else None
    topology = links.nearest_levels if isinstance(links, Network) else links
    paths = list(candidate_paths(src, dst, ITEM_BYTES[dtype], topology))
    # One candidate, as for every even regular pair, needs no pricing.
    if len(paths) > 1:
        paths = Estimator(topology, ITEM_BYTES[dtype], network).cheapest_first(paths)
    best = Plan(paths[0], dtype, topology, executor, memory_limit=memory_limit, network=network)
    return _fitting(faster_by_trees(best) if trees else best, paths)


def with_trees(made: Plan, ways: Any) -> Plan:
    """``made`` with the trees of another rank (``Forest.to_json``), or without trees if None.

    Raises:
        LayoutError: the trees do not serve the layouts of the plan.
        MemoryLimitError: no plan fits the limit.
    """
    if ways is not None:
        return with_ways(made, ways)
    request = made.src, made.dst, made.dtype, made.links, made.memory_limit
    return replace(_cached_plan(*request, made.executor, False), near=made.near)


def _fitting(best: Plan, paths: list[Path]) -> Plan:
    """``best`` if it fits its memory limit, else the first plan of ``_leaner`` that fits."""
    limit = best.memory_limit
    if limit is None or best.cost.peak_bytes <= limit:
        return best
    least = best
    found = list[Plan]()
    # Slices of trees are one way to need less, and a path is another.
    for ways in (_sliced_trees(best), _leaner(best, paths)):
        for candidate in ways:
            if candidate.cost.peak_bytes <= limit:
                found.append(candidate)
                break
            least = min(least, candidate, key=lambda made: made.cost.peak_bytes)
    if found:
        return min(found, key=lambda made: made.cost.secs)
    raise MemoryLimitError(
        f"{best.src.rvd} -> {best.dst.rvd} of shape {best.src.shape} {best.dtype}: "
        f"memory_limit={limit} bytes a rank, but the least that a plan needs is "
        f"{least.cost.peak_bytes}; the src and dst shards alone are {least.bound.peak_bytes}."
    )


def clear_cache() -> None:
    """Forget all plans, so that the next ``plan`` finds an empty cache."""
    _plan_as_given.cache_clear()
    _cached_plan.cache_clear()


def _sliced_trees(best: Plan) -> Iterator[Plan]:
    """Plans by the same trees in more slices; none without trees."""
    if best.forest is not None:
        yield from (replace(best, slices=count) for count in NUM_SLICES if count > best.num_slices)


def _leaner(best: Plan, paths: list[Path]) -> Iterator[Plan]:
    """Plans by steps to try when the best one needs too much memory.

    First every path with its chosen number of slices and with the most slices; then plans that only
    send messages, which may arrive in their final place; then one exchange in more and more
    windows.
    """
    if best.forest is not None:
        best = replace(best, path=paths[0], forest=None, slices=None)
        yield best
    finest = slice_counts(best.path)[-1]
    for path in paths if best.domains else ():
        made = replace(best, path=path)
        yield made
        if made.num_slices < finest:
            yield replace(made, slices=finest)
    if best.executor != "peer":
        best = replace(best, near=())
        yield from (replace(best, path=path) for path in paths)
    if best.src != best.dst:
        windows = (direct_path(best.src, best.dst, count) for count in (1, *WINDOW_COUNTS))
        yield from (replace(best, path=path) for path in windows)
