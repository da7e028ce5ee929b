"""Inspect: the request of this rank, as plain values that other ranks compare with their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rvdcomm.api.options import AS_USUAL, CallOptions
from rvdcomm.api.tensors import fault_of_mode, place_within
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout, dtype_name
from rvdcomm.network import Links
from rvdcomm.run.choice import executor_name
from rvdcomm.run.request import TransitionRequest
from rvdcomm.run.world import World
from rvdcomm.text import quoted

_TYPES: dict[str, tuple[Any, str]] = {
    "src": (Layout | str, "a Layout or a text"),
    "dst": (Layout | str, "a Layout or a text"),
    "shape": (tuple | None, "a tuple of ints"),
    "topology": (Links | None, "a Topology or a Network"),
    "executor": (str | None, "a text"),
    "memory_limit": (int | None, "a number of bytes"),
    "requires_grad": (bool | None, "a bool"),
    "replica_grads": (str, "a text"),
    "names": (Callable | None, "a function from a name in src to the name in dst"),
}
"""The types of the arguments that ranks compare, and how an error calls them."""


def request_of(
    tensor: Any,
    src: Layout | str,
    dst: Layout | str,
    out: Any = None,
    asked: CallOptions = AS_USUAL,
    *,
    misuse: str | None = None,
) -> TransitionRequest:
    """The request of this rank; never raises, whatever was passed.

    Errors are recorded in the request, so that all ranks raise them. ``misuse`` describes an error
    in the tensors, if there is one. A request with an error says nothing else about the tensors.
    """
    misuse = misuse or fault_of_mode() or _misuse_of_arguments(src, dst, asked)
    if misuse is not None:
        return TransitionRequest(str(src), str(dst), None, None, None, None, (), misuse=misuse)
    given = [each.dtype for each in (tensor, out) if each is not None]
    dtypes = [*given, asked.dtype] if asked.dtype else given
    return TransitionRequest(
        src=str(src),
        dst=str(dst),
        shape=asked.shape,
        topology=None if asked.topology is None else repr(asked.topology),
        shard=None if tensor is None else tuple(tensor.shape),
        out=None if out is None else tuple(out.shape),
        dtypes=tuple(str(d).removeprefix("torch.") for d in dtypes),
        executor=executor_name(asked.executor),
        memory_limit=asked.memory_limit,
        requires_grad=grad_flows(tensor, asked.requires_grad),
        asks_grad=bool(asked.requires_grad),
        replica_grads=asked.replica_grads,
        place=place_within(tensor, out),
        device=device_type_of(tensor, out),
    )


def device_type_of(*tensors: Tensor | None) -> str | None:
    """The type of the device of the first tensor that is given; None if none is."""
    return next((tensor.device.type for tensor in tensors if tensor is not None), None)


def backend_of(world: World, *tensors: Tensor | None) -> str | None:
    """Which backend of a group with several moves these tensors; None if none is given.

    Calls that only differ in it are different calls.
    """
    device = device_type_of(*tensors)
    return None if device is None else world.member.serving(device)


def grad_flows(tensor: Tensor | None, requires_grad: bool | None) -> bool | None:
    """Whether a gradient flows back through a call; None if only the other ranks know."""
    if not torch.is_grad_enabled():
        return False
    if requires_grad is not None or tensor is None:
        return requires_grad
    return tensor.requires_grad


def has_agreed(world: World, transition: tuple[Any, ...]) -> bool:
    """Whether ranks agreed on a call of this transition before, whatever tensors they passed.

    If so, ranks compare nothing any more, and a rank that finds an error raises it alone.
    """
    return any(key[: len(transition)] == transition for key in world.agreed)


def misuse_of_types(**given: Any) -> str | None:
    """The error of the first argument of a wrong type; None if there is none."""
    for name, value in given.items():
        if name not in _TYPES:
            continue
        kind, words = _TYPES[name]
        # Only where a number is expected too is a bool, which is one in Python, an error.
        if not isinstance(value, kind) or (isinstance(value, bool) and isinstance(0, kind)):
            return f"{name} is {quoted(value)}; give {words}."
    return None


def _misuse_of_arguments(src: Any, dst: Any, asked: CallOptions) -> str | None:
    """The error of the first argument that cannot be used; None if there is none."""
    if (misuse := misuse_of_types(src=src, dst=dst, **asked._asdict())) is not None:
        return misuse
    if not all(type(size) is int for size in asked.shape or ()):
        return f"shape is {quoted(asked.shape)}; give a tuple of ints."
    try:
        executor_name(asked.executor)
        if asked.dtype is not None:
            dtype_name(asked.dtype)
    except LayoutError as error:
        return str(error)
    return None
