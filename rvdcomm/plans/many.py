"""Many: plan the transitions of many tensors as one call, by their names (docs/many.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout, dtype_name
from rvdcomm.network import Link, Links, Network, Topology, check_links
from rvdcomm.plans.bundle import Bundle
from rvdcomm.plans.many_by_trees import faster_by_trees
from rvdcomm.plans.member import Member, TensorPlan
from rvdcomm.plans.path_tensor import PathTensor
from rvdcomm.plans.planner import check_executor, default_topology, plan
from rvdcomm.program import Transition, wire_dtype


def plan_many(
    src: Mapping[str, Layout],
    dst: Mapping[str, Layout],
    dtype: str | Mapping[str, str],
    *,
    dst_dtype: str | Mapping[str, str] | None = None,
    names: Callable[[str], str] | None = None,
    topology: Links | None = None,
    memory_limit: int | None = None,
    executor: str = "auto",
) -> Bundle:
    """Plan the transitions of many tensors as one call.

    Args:
        src, dst: the layouts of every tensor, by the names that it has on either side.
        dtype: dtype of the tensors: one for all, or one per name of ``src``.
        dst_dtype: dtype of the results; ``dtype`` if None, or where a mapping has no entry.
        names: function from a name in ``src`` to the name in ``dst``; equal names if None.
        topology, executor: as in ``plan``.
        memory_limit: the most bytes that a rank's buffers may take, the src and dst shards of all
            tensors included.

    Raises:
        LayoutError: names or shapes do not match, a layout is illegal, or there is no such
            executor.
        MemoryLimitError: no bundle fits; the message names the least peak of those tried.
    """
    check_executor(executor)
    pairs = matched(src, dst, names)
    if topology is None:
        topology = default_topology(
            {rank for side in (src, dst) for layout in side.values() for rank in layout.ranks}
        )
    check_links(topology)
    network = None
    if isinstance(topology, Network):
        network = None if topology.levels else topology
        topology = topology.nearest_levels
    shared = _shared_alpha(network or topology, len(pairs))
    tensor_plans: dict[tuple[Layout, Layout, str, str], TensorPlan] = {}
    members = []
    for src_name, name in pairs:
        own = dtype_name(dtype[src_name] if isinstance(dtype, Mapping) else dtype)
        given = dst_dtype.get(name) if isinstance(dst_dtype, Mapping) else dst_dtype
        key = src[src_name], dst[name], own, dtype_name(given) if given else own
        if key not in tensor_plans:
            try:
                tensor_plans[key] = _by_path(Transition(*key), shared, executor)
            except LayoutError as error:
                raise LayoutError(f"tensor {name!r}: {error}") from None
        members.append(Member(src_name, name, tensor_plans[key]))
    bundle = Bundle(tuple(members), topology, executor, memory_limit=memory_limit, network=network)
    return faster_by_trees(bundle)


def _by_path(transition: Transition, links: Links, executor: str) -> TensorPlan:
    """The plan of one of many tensors, by a path."""
    request = transition.src, transition.dst, wire_dtype(transition), links
    made = plan(*request, executor=executor, trees=False)
    return PathTensor(replace(transition, view=made.path.view), made)


def matched(
    src: Mapping[str, object], dst: Mapping[str, object], names: Callable[[str], str] | None
) -> list[tuple[str, str]]:
    """(name in src, name in dst) of every tensor, in the order of src.

    Raises:
        LayoutError: two tensors get one name, or some have no partner.
    """
    pairs = [(name, name if names is None else names(name)) for name in src]
    mapped = [name for _, name in pairs]
    if len(set(mapped)) < len(mapped):
        twice = next(name for name, count in Counter(mapped).items() if count > 1)
        both = [name for name, to in pairs if to == twice]
        raise LayoutError(f"redistribute_many: names maps {both} to one name, {twice!r}.")
    if set(mapped) != set(dst):
        odd = sorted(set(mapped) ^ set(dst), key=str)
        raise LayoutError(f"redistribute_many: src and dst differ in the names {odd[:5]}.")
    if not pairs:
        raise LayoutError("redistribute_many: there is no tensor.")
    return pairs


def _shared_alpha(links: Links, num_tensors: int) -> Links:
    """The links for planning one of many tensors, which share the latency of each round."""

    def shared(link: Link) -> Link:
        return replace(link, alpha_secs=link.alpha_secs / num_tensors)

    if isinstance(links, Network):
        wires = (replace(wire, link=shared(wire.link)) for wire in links.wires)
        return Network(tuple(wires), links.switches)
    levels = (replace(level, link=shared(level.link)) for level in links.levels)
    return Topology(tuple(levels))
