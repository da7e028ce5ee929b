"""redistribute_many: state dicts with DTensors, whatever meshes they are on, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

import rvdcomm
from rvdcomm import RVD, Layout, LayoutError
from rvdcomm.api import breaks_graph
from rvdcomm.interop.dtensor import private
from rvdcomm.interop.dtensor.numbering import Numbering, numbering_of
from rvdcomm.interop.dtensor.placements import layout_of, layout_of_dtensor, normalized
from rvdcomm.interop.dtensor.redistribute import Placed, dtensor_of
from rvdcomm.run import World, compare_requests

Target = Layout | str | DTensor | tuple[DeviceMesh, Sequence[Placement]]
"""Where a tensor is to be: a layout, a mesh with placements, or where another DTensor is."""

WHAT = "redistribute_many of DTensors"


@breaks_graph
def redistribute_many(
    tensors: Mapping[str, Tensor],
    dst: Mapping[str, Target],
    *,
    src: Mapping[str, Layout | str] | None = None,
    group: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Redistribute a state dict whose tensors may be DTensors, as one call.

    Collective over ``group``. Every rank passes the tensors that it has; a rank may lack
    some, as a pipeline stage does. Ranks tell each other where their tensors are. If ranks have one
    tensor on different meshes (as norms are, on one submesh per tensor-parallel rank), these are
    its replicas: their values must be equal, which is not checked.

    Args:
        tensors: this rank's tensors by name: DTensors, or others with an entry in ``src``; a
            Parameter counts as its data. They are not modified and get no gradient.
        dst: where tensors are to be, by name; for all tensors, or for those that this rank gets. A
            tensor that has no entry on any rank is an error.
        src: layouts of the tensors that are no DTensors.
        group: the process group, the default group if None. It may join ranks of several jobs.
            Layouts number ranks as the group does; the ranks of meshes are those of the default
            group of each job, and are translated.
        options: as of ``rvdcomm.redistribute_many``: ``dst_dtype``, ``memory_limit``,
            ``topology``, ``executor``, ``progress``, ``options``.

    Returns:
        By name of ``dst``: a DTensor where the target is one or is a mesh, and this rank is in that
        mesh; else this rank's shard, or None.

    Raises:
        LayoutError: a tensor has no layout, or ranks disagree about it; the same on all ranks.
        ShapeMismatchError, MemoryLimitError, CommError: as of ``rvdcomm.redistribute_many``.
    """
    if group is None:
        group = getattr(options.get("options"), "group", None)
    world, numbering = World.of(group), numbering_of(group)
    fault: LayoutError | None = None
    own: dict[str, dict[str, str]] = {"src": {}, "dst": {}}
    try:
        if options.get("async_op"):
            raise LayoutError(
                "async_op=True is for rvdcomm.redistribute_many, with layout_of_dtensor and "
                "tolocal_tensor() of each tensor."
            )
        sources = _sources(tensors, src or {}, numbering)
        own = {"src": sources, "dst": _targets(sources, dst, numbering)}
    except LayoutError as error:
        fault = LayoutError(f"{WHAT}: rank {world.rank}: {error}")
    everybody = tuple(range(world.size))
    posts = compare_requests(world, everybody, {}, WHAT, fault=fault, **own)
    before, after = (_merged(posts, side) for side in ("src", "dst"))
    _check_names(before, after)
    here = {name: t for name, t in tensors.items() if name in before and _is_here(t)}
    locals_ = {name: local_tensor(tensor) for name, tensor in here.items()}
    if not locals_ and not any(world.rank in x for x in (*before.values(), *after.values())):
        return dict.fromkeys(after)
    moved = rvdcomm.redistribute_many(locals_, before, after, group=group, **options)
    return {name: _placed(moved[name], dst.get(name), after[name]) for name in after}


def _sources(
    tensors: Mapping[str, Tensor], src: Mapping[str, Layout | str], numbering: Numbering
) -> dict[str, str]:
    found = {name: str(layout) for name, layout in src.items()}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if _is_here(tensor):
                found[name] = str(layout_of_dtensor(tensor, numbering))
        elif name not in found:
            raise LayoutError(f"{name!r} is no DTensor; give its layout in src.")
    return found


def _targets(
    sources: Mapping[str, str], dst: Mapping[str, Target], numbering: Numbering
) -> dict[str, str]:
    found = {}
    for name, target in dst.items():
        if isinstance(target, DTensor):
            found[name] = str(layout_of_dtensor(target, numbering))
        elif isinstance(target, tuple):
            if name not in sources:
                raise LayoutError(
                    f"{name!r} is not on this rank, so a mesh and placements do not say its shape; "
                    "give a Layout or a DTensor."
                )
            shape = Layout.parse(sources[name]).shape
            found[name] = str(layout_of(*target, shape, numbering))
        else:
            found[name] = str(target)
    return found


def _merged(posts: Mapping[int, Mapping[str, Any]], side: str) -> dict[str, Layout]:
    """The layout of every tensor, from the layouts that all ranks posted."""
    said: dict[str, set[str]] = {}
    for post in posts.values():
        for name, text in post[side].items():
            said.setdefault(name, set()).add(text)
    return {name: union_of(name, sorted(map(Layout.parse, said[name]), key=str)) for name in said}


def union_of(name: str, layouts: Sequence[Layout]) -> Layout:
    """One layout of tensors that are replicas of each other, each on other ranks.

    Raises:
        LayoutError: the layouts are not of replicas.
    """
    first = layouts[0]
    ranks = [rank for layout in layouts for rank in layout.ranks]
    alike = {(layout.shape, layout.rvd.v, layout.rvd.d, layout.cuts) for layout in layouts}
    if len(alike) > 1 or len(set(ranks)) < len(ranks):
        texts = "; ".join(map(str, layouts))
        raise LayoutError(f"{WHAT}: ranks disagree about tensor {name!r}: {texts}.")
    replicas = sum(layout.rvd.r for layout in layouts)
    rvd = RVD(replicas, first.rvd.v, first.rvd.d)
    return Layout(first.shape, rvd, ranks=ranks, cuts=first.cuts)


def _check_names(before: Mapping[str, Layout], after: Mapping[str, Layout]) -> None:
    for missing, side in ((before.keys() - after, "dst"), (after.keys() - before, "src")):
        if missing:
            names = sorted(missing)
            raise LayoutError(f"{WHAT}: no rank says where {names[:5]} are in {side}.")


def _is_here(tensor: Tensor) -> bool:
    """Whether this rank has a shard: a DTensor is empty on a rank outside its mesh."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, without its gradient; waits until it is there."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return private.waited(local).detach()


def _placed(shard: Tensor | None, target: Target | None, layout: Layout) -> Any:
    if isinstance(target, DTensor):
        target = target.device_mesh, target.placements
    if not isinstance(target, tuple):
        return shard
    mesh, placements = target
    if mesh.get_coordinate() is None:
        return None
    placements = normalized(placements, mesh.shape, len(layout.shape))
    local = torch.empty(0) if shard is None else shard
    return dtensor_of(local, Placed(mesh, placements, layout.shape))
