"""Learned inputs: the gradients of a step's inputs, as ``backward`` leaves them in torch.

A rank's segments read slices of a leaf, so autograd brings this rank's gradients to it, microbatch
by microbatch. Those of all ranks add up; of ranks that do the same work, one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.run.moves import Route
from superscaler_core.run.tables import SubTransfer
from superscaler_core.run.transport import Transport


@contextmanager
def learned(
    compiled: Compiled, transport: Transport, batch: Mapping[str, Any], device: torch.device
) -> Iterator[dict[str, Any]]:
    """The batch of a step, in which leaves stand for inputs that require gradients; collective.

    At the end, these have their gradients on all ranks, added to what they had.

    Raises:
        PlanError: a rank does some of its work on an input alone, and some as another rank does.
    """
    wanted = {n: x for n, x in batch.items() if isinstance(x, Tensor) and x.requires_grad}
    leaves = {name: tensor.detach() for name, tensor in wanted.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(_counts(compiled, name, transport.rank))
    yield {**batch, **leaves}
    for name, tensor in wanted.items():
        grad = leaves[name].grad
        own = torch.zeros_like(leaves[name]) if grad is None else grad
        whole = _summed(own.to(device), compiled, transport).to(tensor.device)
        # As torch's backward: the tensor may be a leaf, or computed by another model.
        torch.autograd.backward(tensor, whole)


def _counts(compiled: Compiled, name: str, rank: int) -> bool:
    """Whether the gradients of an input that this rank computes count in the sum."""
    plan = compiled.plan
    replicas: dict[Device, set[int]] = {}
    for op in plan.graph.ops:
        if any(tensor.name == name for tensor in op.inputs):
            for part in plan.op_split(op).parts:
                assert part.device is not None, "the plan was compiled"
                replicas.setdefault(part.device, set()).add(part.replica)
    for device, mine in sorted(replicas.items()):
        if len(mine) > 1 and 0 in mine:
            raise PlanError(
                f"rank {device} computes some of the gradient of input {name!r} alone, and some as "
                "another rank does, and the sum over ranks has both: use another plan, or detach "
                "the input."
            )
    return replicas.get(rank, {1}) <= {0}


def _summed(own: Tensor, compiled: Compiled, transport: Transport) -> Tensor:
    """The sum of a tensor of every rank, on every rank."""
    ranks = compiled.plan.devices
    if len(ranks) == 1:
        return own
    shape = tuple(own.shape) or (1,)
    cut, num = ",".join("1" * len(shape)), len(ranks)
    src, dst = (
        str(rv.Layout(shape, f"R({r})V({v})D({cut})", ranks)) for r, v in ((1, num), (num, 1))
    )
    box = rv.Box.of_shape(shape)
    dtype = str(own.dtype).removeprefix("torch.")
    route = Route(transport, [SubTransfer(str(box), src, dst, dtype)], box, box)
    found = route.move(own.contiguous().view(shape))
    assert found is not None, "every rank gets the sum"
    return found.view(own.shape)
