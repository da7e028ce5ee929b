"""Process groups: what rvdcomm needs to know of a group, whoever made it.

Groups come from ``torch.distributed`` (the default group, ``new_group``, device meshes), from
frameworks that join separate jobs (each job keeps its own default group, or has none; the joint
group has a store of its own), and from others, such as vLLM's ``StatelessProcessGroup``. So nothing
here is derived from the default group: a group's own rank, size and store are used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._library.fake_class_registry import FakeScriptObject

from rvdcomm.errors import CommError, LayoutError
from rvdcomm.run.communicator import MAKERS
from rvdcomm.text import quoted

_PROBE_TAG = (1 << 31) - 1
"""The tag of receives that no rank sends to, in the caller's group: the largest that gloo has."""


@dataclass(frozen=True)
class Membership:
    """This process as a member of a group.

    ``backends`` holds the supported backends by the type of the devices that they serve; it is not
    empty. ``is_registered`` says that torch's table of groups has the group, until it is destroyed.
    ``group`` is a weak reference, because a group lives as long as its user wants.
    """

    rank: int
    size: int
    name: str
    store: Any
    timeout: timedelta
    backends: Mapping[str, str]
    group: weakref.ref[Any] = field(compare=False)
    is_registered: bool = False

    @property
    def default_backend(self) -> str:
        """The backend of calls that pass no tensor: NCCL if the group has it."""
        return "nccl" if "nccl" in self.backends.values() else next(iter(self.backends.values()))

    def serving(self, device_type: str) -> str:
        """The backend that moves tensors on devices of a type.

        Raises:
            LayoutError: there is none.
        """
        found = self.backends.get(device_type)
        # gloo also moves tensors of GPUs, through memory of the host.
        found = found or ("gloo" if "gloo" in self.backends.values() else None)
        if found is None:
            each = ",".join(f"{device}:{name}" for device, name in self.backends.items())
            raise LayoutError(
                f"process group {self.name!r} has backend {each}, which moves no tensors on "
                f"{device_type}; make a group with a backend for them, as cpu:gloo,cuda:nccl."
            )
        return found

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose process ended, or that destroyed the group, if that is known.

        Only gloo can tell: its ranks are connected from the beginning, and a receive on a closed
        connection raises at once. On an open one it takes a few microseconds, and stays unanswered.
        """
        group = self.group()
        backend = None if group is None else _gloo_of(group)
        if backend is None:
            return []
        nothing = torch.empty(1, dtype=torch.uint8)
        found = []
        for rank in ranks:
            if rank != self.rank:
                try:
                    backend.recv([nothing], rank, _PROBE_TAG)
                except RuntimeError:
                    found.append(rank)
        return found

    def is_destroyed(self) -> bool:
        """Whether torch's table had the group, and has it no more."""
        return self.is_registered and self.group() not in dist.distributed_c10d._world.pg_map


def real_group(group: Any) -> Any:
    """The group itself, if ``torch.compile`` passes a stand-in for it while it traces."""
    if isinstance(group, FakeScriptObject):
        return object.__getattribute__(group, "real_obj")
    return group


def membership_of(group: Any) -> Membership:
    """What is to know of a process group.

    Args:
        group: a process group of torch, or an object with ``rank``, ``world_size`` and ``store``.

    Raises:
        CommError: this rank is not in the group, or no backend of the group is supported.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise CommError("this rank is not a member of the group that was given.")
    if isinstance(group, dist.ProcessGroup):
        return _of_torch(group)
    if all(hasattr(group, name) for name in ("rank", "world_size", "store")):
        with suppress(TypeError):  # A weak reference, without which nobody knows when it ends.
            return _of_stateless(group)
    raise CommError(
        f"group is {quoted(group)}; give a torch.distributed.ProcessGroup, or an object with rank, "
        "world_size and store, to which there may be weak references."
    )


def _of_torch(group: Any) -> Membership:
    given = {device.type: group._get_backend(device) for device in group._device_types}
    names = {device: backend.name().lower() for device, backend in given.items()}
    backends = {device: name for device, name in sorted(names.items()) if name in MAKERS}
    if not backends:
        each = ",".join(f"{device}:{name}" for device, name in names.items()) or "none"
        raise CommError(f"backend {each} is not supported; use one of {', '.join(sorted(MAKERS))}.")
    rank, size = group.rank(), group.size()
    name = ""
    with suppress(RuntimeError, KeyError, ValueError):  # Not all groups have one.
        name = group.group_name
    timeout = dist.default_pg_timeout
    for backend in given.values():
        with suppress(RuntimeError, AttributeError):  # Some backends have no options.
            timeout = backend.options._timeout
            break
    is_registered = group in dist.distributed_c10d._world.pg_map
    store = group.get_group_store()
    ref = weakref.ref(group)
    return Membership(
        rank, size, name or _unnamed(group), store, timeout, backends, ref, is_registered
    )


def _of_stateless(group: Any) -> Membership:
    """The membership of a group that has a store and no backend: ours are made from the store."""
    backends = {"cpu": "gloo"}
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends["cuda"] = "nccl"
    timeout = getattr(group.store, "timeout", dist.default_pg_timeout)
    return Membership(
        group.rank,
        group.world_size,
        _unnamed(group),
        group.store,
        timeout,
        backends,
        weakref.ref(group),
    )


def _unnamed(group: Any) -> str:
    return f"{type(group).__name__} at {id(group):#x}"


def _gloo_of(group: Any) -> Any:
    """The gloo backend that the group itself has; None if it has none."""
    with suppress(RuntimeError, AttributeError):
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "gloo":
                return backend
    return None
