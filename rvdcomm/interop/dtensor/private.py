"""The private names of torch that this package needs (torch 2.11 to 2.13).

- ``_StridedShard``: a strided placement has no public name.
- ``DTensor._spec``: the shard order, and whether two DTensors are placed alike.
- ``redistribute_local_tensor``: the one function that every redistribution of DTensor passes, asked
  for or implied by an operator, forward or backward. Three modules know it by name.
- ``_are_we_tracing``: under torch.compile a plan cannot run.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from rvdcomm import LayoutError

HOOK = "redistribute_local_tensor"
_TENSOR = "torch.distributed.tensor"
_CALLERS = ("_redistribute", "_dispatch", "_api")


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a strided shard."""
    return _named(f"{_TENSOR}.placement_types", "_StridedShard")(dim, split_factor=split_factor)


def shard_order(dtensor: Any) -> dict[int, tuple[int, ...]]:
    """By tensor dim: the mesh dims that cut it, in their order; {} if that is left to right.

    Strided placements contain the order themselves. They are taken literally, as DTensor does when
    it makes shards.
    """
    order = getattr(spec_of(dtensor), "shard_order", None)
    if order is None or any(hasattr(p, "split_factor") for p in dtensor.placements):
        return {}
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}


def spec_of(dtensor: Any) -> Any:
    """The spec of a DTensor; any other object is returned as it is."""
    return getattr(dtensor, "_spec", dtensor)


def key_of(spec: Any) -> tuple[Any, ...]:
    """A spec as a value: DTensor may change it in place, and its strides mean nothing here."""
    return spec.device_mesh, spec.placements, getattr(spec, "shard_order", None), spec.shape


def callers() -> list[Any]:
    """Modules in which ``redistribute_local_tensor`` has to be replaced."""
    modules = [importlib.import_module(f"{_TENSOR}.{name}") for name in _CALLERS]
    for module in modules:
        _named(module.__name__, HOOK)
    return modules


def are_tracing() -> bool:
    """Whether torch.compile is tracing, so that no plan can run."""
    return bool(_named("torch.distributed._functional_collectives", "_are_we_tracing")())


def waited(tensor: Any) -> Tensor:
    """The tensor itself; waits for the collective of DTensor that may still be filling it."""
    waited: Tensor = tensor.wait() if hasattr(tensor, "trigger_wait") else tensor
    return waited


def _named(module: str, name: str) -> Any:
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        import torch

        raise LayoutError(
            f"torch {torch.__version__} has no {module}.{name}; rvdcomm.interop.dtensor knows "
            "torch 2.11 to 2.13."
        )
    return found
