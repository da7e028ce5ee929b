"""Agreement about a call of ``redistribute_many``: what ranks tell each other, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rvdcomm.api.float8 import is_float8
from rvdcomm.api.inspect import device_type_of
from rvdcomm.api.many_memory import Groups, Tied
from rvdcomm.api.many_request import WHAT, ManyRequest, name_of
from rvdcomm.errors import LayoutError, ShapeMismatchError
from rvdcomm.run.agree import compare_requests
from rvdcomm.run.request import check_in_group, common_device
from rvdcomm.run.world import World


class Agreed(NamedTuple):
    """What follows from what ranks tell each other.

    Attributes:
        dtypes: those of all tensors, by name in src.
        tied: the names that are tied to others.
        device: the type of the device that the tensors are on.
    """

    dtypes: Mapping[str, str]
    tied: Tied
    device: str


def agree(world: World, request: ManyRequest) -> Agreed:
    """Compare the requests of all ranks.

    Raises:
        LayoutError, ShapeMismatchError: ranks disagree, or some rank's request is illegal; the same
            on all ranks.
        CommError: a rank did not join.
    """
    members = request.ranks(world.size)
    check_in_group(members, world.size, WHAT)
    if world.rank not in members:
        raise LayoutError(f"{WHAT}: rank {world.rank} called it but is in none of the layouts.")
    fault: Exception | None = None
    asked: dict[str, Any] = {}
    in_one: tuple[Groups, Groups] = ((), ())
    try:
        request.check_usable(world.rank)
        asked = request.asked()
        request.check(world.rank)
        memory = request.memory
        in_one = memory.tensors_in_one(request.src_of), memory.outs_in_one
    except (LayoutError, ShapeMismatchError) as error:
        fault = error
    said = {name: dtype for name in request.src if (dtype := request.asked_dtype(name))}
    has = said | {name: name_of(tensor.dtype) for name, tensor in request.tensors.items()}
    out = {name: name_of(tensor.dtype) for name, tensor in request.out.items()}
    device = device_type_of(*request.tensors.values(), *request.out.values())
    own = {"tensors": has, "out": out, "in_one": in_one, "device": device}
    posts = compare_requests(world, members, asked, WHAT, fault=fault, **own)
    dtypes = _dtypes(request, posts)
    groups = {rank: post["in_one"] for rank, post in posts.items()}
    tied = Tied.of(groups, request.src_of, *request.layouts)
    devices = {rank: post["device"] for rank, post in posts.items()}
    common = common_device(devices, world.member, WHAT)
    return Agreed(dtypes, tied, common or world.device.type)


def _dtypes(request: ManyRequest, posts: Mapping[int, Any]) -> dict[str, str]:
    """The dtype of every tensor, of which all ranks that have it must agree."""
    found: dict[str, tuple[int, str]] = {}
    for rank, post in posts.items():
        for name, dtype in post["tensors"].items():
            other, known = found.setdefault(name, (rank, dtype))
            if known != dtype:
                raise ShapeMismatchError(
                    f"{WHAT}: tensor {name!r}: ranks disagree about dtype: rank {other} has "
                    f"{known}, rank {rank} has {dtype}."
                )
    dtypes = {name: dtype for name, (_, dtype) in found.items()}
    wanted = {name: request.becomes(name, dtypes[s]) for s, name in request.pairs}
    for rank, post in posts.items():
        request.check_out_dtypes(rank, post["out"], wanted)
    for s, name in request.pairs:
        turns = is_float8(dtypes[s]) != is_float8(wanted[name])
        is_named = isinstance(request.scale, Mapping) and request.scale_of(name) is not None
        if is_named and not turns:
            raise LayoutError(
                f"{WHAT}: tensor {name!r} has a scale, but goes from {dtypes[s]} to "
                f"{wanted[name]}; a scale is for one side of float8."
            )
        if request.is_scaled(name, dtypes[s]) and request.layouts[0][s].rvd.v > 1:
            raise LayoutError(f"{WHAT}: tensor {name!r}: parts are summed before they are scaled.")
    return dtypes
