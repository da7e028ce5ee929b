"""Saved: a plan as a file, so that a job plans once and the next one reads what was chosen.

A file has the request and the choice: the steps of the path by their texts, the slices, the trees.
Reading it finds the path again, which takes milliseconds, and neither prices paths nor grows trees.
A file is not trusted: it can only name a path that the planner knows, or trees that serve the
layouts, and the plan has to be the one that was saved, by the digest of its identity.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path as FilePath
from typing import Any

from rvdcomm.errors import LayoutError
from rvdcomm.json_file import entry, read_json, write_json
from rvdcomm.layout import ITEM_BYTES, Layout, check_summable, dtype_name
from rvdcomm.network import Links, Network, Topology
from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.path import Path
from rvdcomm.plans.by_trees import with_ways
from rvdcomm.plans.plan import Plan
from rvdcomm.plans.planner import WINDOW_COUNTS, check_executor
from rvdcomm.text import quoted

FORMAT, VERSION = "rvdcomm plan", 1

MAX_PLAN_FILE_BYTES = 256 << 20
"""The trees of an all-to-all of 64 ranks on a network take about a tenth of this."""


def save_plan(plan: Plan, path: str | FilePath) -> None:
    """Write a plan to a file, which ``load_plan`` reads.

    Raises:
        OSError: the file cannot be written; a file that was there is as before.
    """
    write_json(path, to_json(plan))


def load_plan(path: str | FilePath) -> Plan:
    """The plan that ``Plan.save`` wrote; it runs as ``Redistributor(load_plan(file), group)``.

    Raises:
        LayoutError: the file is no plan, is of another version, or was changed; or this release has
            no such path between the two layouts.
        OSError: the file cannot be read.
    """
    try:
        return from_json(read_json(path, MAX_PLAN_FILE_BYTES))
    except LayoutError as error:
        raise LayoutError(f"{path} is not a plan: {str(error).rstrip('.')}.") from None


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, which ``from_json`` reads."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "src": str(plan.src),
        "dst": str(plan.dst),
        "dtype": plan.dtype,
        "executor": plan.executor,
        "memory_limit": plan.memory_limit,
        "near": plan.near,
        "slices": plan.slices,
        "steps": _texts(plan.path),
        "trees": None if plan.forest is None else plan.forest.to_json(),
        "links": plan.links.to_json(),
        "digest": _digest(plan),
    }


def from_json(values: Any) -> Plan:
    """The plan of plain values as ``to_json`` gives them; they are not trusted.

    Raises:
        LayoutError: they are no such plan, or one that this release cannot make.
    """
    named = values.get("format") if isinstance(values, dict) else None
    if (named, values.get("version") if named else None) != (FORMAT, VERSION):
        raise LayoutError(f"it has no 'format': '{FORMAT}' of 'version': {VERSION}")
    src, dst = (Layout.parse(entry(values, side, str)) for side in ("src", "dst"))
    dtype = dtype_name(entry(values, "dtype", str))
    check_executor(executor := entry(values, "executor", str))
    if src.shape != dst.shape:
        raise LayoutError(f"src {src} and dst {dst} differ in shape")
    check_summable(dtype, [src, dst])
    links = _links_of(entry(values, "links", dict))
    for layout in (src, dst):
        links.check_ranks(layout.ranks)
    network = links if isinstance(links, Network) else None
    topology = links.nearest_levels if isinstance(links, Network) else links
    trees, steps = values.get("trees"), entry(values, "steps", list)
    path = direct_path(src, dst) if trees else _path(src, dst, dtype, topology, steps)
    made = Plan(
        path,
        dtype,
        topology,
        executor,
        near=_domains_of(values.get("near"), {*src.ranks, *dst.ranks}),
        slices=_count_of(values, "slices"),
        memory_limit=_count_of(values, "memory_limit"),
        network=network,
    )
    if trees:
        made = replace(with_ways(made, trees), near=made.near, slices=made.slices)
    if _digest(made) != entry(values, "digest", str):
        raise LayoutError("its entries are not those that were saved, or another release saved it")
    return made


def _texts(path: Path) -> list[list[Any]]:
    return [[step.kind, step.num_slices, step.dst.text] for step in path.steps]


def _digest(plan: Plan) -> str:
    return sha256(f"{plan.identity} below {plan.memory_limit}".encode()).hexdigest()


def _links_of(values: Any) -> Links:
    return (Topology if "levels" in values else Network).from_json(values)


def _path(src: Layout, dst: Layout, dtype: str, topology: Topology, steps: list[Any]) -> Path:
    """The path with steps of these texts."""
    for path in candidate_paths(src, dst, ITEM_BYTES[dtype], topology):
        if _texts(path) == steps:
            return path
    if src != dst:
        for count in (1, *WINDOW_COUNTS):
            path = direct_path(src, dst, count)
            if _texts(path) == steps:
                return path
    raise LayoutError(f"this release has no path of the steps {quoted(steps)} from {src} to {dst}")


def _domains_of(values: Any, ranks: set[int]) -> tuple[tuple[int, ...], ...] | None:
    """Disjoint groups of the ranks, or None."""
    if values is None:
        return None
    is_groups = type(values) is list and all(type(group) is list for group in values)
    named = [rank for group in values for rank in group] if is_groups else [None]
    if any(type(rank) is not int for rank in named) or len(set(named)) < len(named):
        raise LayoutError(f"'near' must be disjoint lists of ranks, got {quoted(values)}")
    if not ranks.issuperset(named):
        raise LayoutError(f"'near' names ranks in neither layout: {quoted(values)}")
    return tuple(tuple(group) for group in values)


def _count_of(values: Any, name: str) -> int | None:
    """An integer of at least 1, or None."""
    if values.get(name) is None:
        return None
    if (found := entry(values, name, int)) < 1:
        raise LayoutError(f"{name!r} must be at least 1, got {quoted(found)}")
    return found
