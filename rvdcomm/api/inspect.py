"""What this rank was asked for, and what is wrong with its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rvdcomm.layout import Layout, Topology
from rvdcomm.run.request import Request


def request_of(
    tensor: Tensor | None,
    src: Layout | str,
    dst: Layout | str,
    *,
    shape: tuple[int, ...] | None = None,
    topology: Topology | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    executor: str = "auto",
    requires_grad: bool | None = None,
    replica_grads: str = "parts",
) -> Request:
    """What this rank was asked for, as plain values."""
    dtypes = [t.dtype for t in (tensor, out) if t is not None] + ([dtype] if dtype else [])
    return Request(
        src=str(src),
        dst=str(dst),
        shape=None if shape is None else tuple(shape),
        topology=None if topology is None else repr(topology),
        shard=None if tensor is None else tuple(tensor.shape),
        out=None if out is None else tuple(out.shape),
        dtypes=tuple(str(d).removeprefix("torch.") for d in dtypes),
        executor=executor,
        misuse=misuse_of(tensor, out),
        requires_grad=grad_flows(tensor, requires_grad),
        asks_grad=bool(requires_grad),
        replica_grads=replica_grads,
    )


def grad_flows(tensor: Tensor | None, requires_grad: bool | None) -> bool | None:
    """Whether a gradient is to flow back through a call; None if only the other ranks know."""
    if not torch.is_grad_enabled():
        return False
    if requires_grad is not None or tensor is None:
        return requires_grad
    return tensor.requires_grad


def misuse_of(tensor: Tensor | None, out: Tensor | None) -> str | None:
    """What is wrong with tensors that would be overwritten."""
    if tensor is not None and out is not None and tensor.numel() and _same_storage(tensor, out):
        return "out shares memory with the tensor; give another out."
    return None


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def resolved(tensor: Tensor) -> Tensor:
    """The tensor with bytes of its own: lazily conjugated or negated, it has none."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor
