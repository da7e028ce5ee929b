"""redistribute: a DTensor on other placements, or on another mesh; differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from rvdcomm import LayoutError, Network, Topology
from rvdcomm.api import breaks_graph
from rvdcomm.interop.dtensor import private
from rvdcomm.interop.dtensor.move import Draft, DTensorMove, Options
from rvdcomm.interop.dtensor.placements import normalized, sharding_of_dtensor
from rvdcomm.run import World


@dataclass(frozen=True)
class Placed:
    """Mesh, placements and shape of a tensor: a DTensorSpec without strides."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


@breaks_graph
def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    topology: Topology | Network | None = None,
    executor: str | None = None,
    group: Any = None,
) -> DTensor:
    """Return ``dtensor`` on ``placements`` of ``device_mesh``, which may have other ranks.

    Collective over the ranks of both meshes; a rank in neither may call it too, and does nothing.
    As everywhere in DTensor, a rank outside a mesh has a DTensor there whose local tensor is empty:
    it passes one (see ``placeholder``) and gets one.

    Differentiable, any number of times. The gradient comes back on the mesh and placements of
    ``dtensor``, but replicated where ``dtensor`` is partial, as in DTensor itself. ``backward`` is
    collective like the call, so ranks outside ``device_mesh`` call it too.

    Args:
        dtensor: a DTensor of any placements, also strided and uneven ones; not modified. Its parts
            must be summed or averaged, or stay as they are.
        device_mesh: a mesh of the same device type; that of ``dtensor`` if None. Its ranks are
            ranks of the default group of this job.
        placements: one for every dim of ``device_mesh``; replicated if None.
        topology, executor: as of ``rvdcomm.redistribute``; a topology numbers ranks as ``group``.
        group: the process group whose connections are used, which holds all ranks of both meshes;
            the default group if None.

    Raises:
        LayoutError: there is no such transition, or ranks disagree about it.
        ShapeMismatchError: some rank's local tensor is not what ``dtensor.placements`` give it. In
            the first call of a transition, every rank raises this error or the LayoutError.
        CommError: a peer failed, or did not join within the group's timeout.
    """
    if not isinstance(dtensor, DTensor):
        raise LayoutError(
            f"redistribute takes a DTensor, not a {type(dtensor).__name__}; a rank outside the src "
            "mesh passes placeholder(mesh, placements, shape, dtype)."
        )
    mesh = dtensor.device_mesh if device_mesh is None else device_mesh
    wanted = [Replicate()] * mesh.ndim if placements is None else placements
    dst = Placed(mesh, normalized(wanted, mesh.shape, dtensor.ndim), dtensor.shape)
    options = Options(topology, executor, group=group)
    return _applied(dtensor, private.spec_of(dtensor), dst, options)


def placeholder(
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    requires_grad: bool = False,
) -> DTensor:
    """The empty DTensor of a rank outside ``device_mesh``.

    Raises:
        LayoutError: this rank is in the mesh, or the placements do not fit.
    """
    if device_mesh.get_coordinate() is not None:
        raise LayoutError(
            f"this rank is in the mesh {device_mesh.mesh.tolist()}; pass its DTensor, not a "
            "placeholder."
        )
    placed = Placed(
        device_mesh, normalized(placements, device_mesh.shape, len(shape)), tuple(shape)
    )
    empty = torch.empty(0, dtype=dtype, device=device_mesh.device_type)
    made = dtensor_of(empty, placed)
    made.requires_grad_(requires_grad)
    return made


def move_of(src: Any, dst: Any, shard: Tensor, options: Options) -> DTensorMove:
    """The compiled transition between two specs; the first call is collective over its ranks."""

    def make() -> DTensorMove:
        return DTensorMove(Draft.of(src, dst, shard.dtype, options), tuple(shard.shape))

    key = ("dtensor", private.key_of(src), private.key_of(dst), shard.dtype, options)
    made: DTensorMove = World.of(options.group).once(key, make)
    return made


class _RedistributeDTensor(torch.autograd.Function):
    """The autograd node of a redistribution; its backward is one too, so it is differentiable."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, src: Any, dst: Placed, options: Options) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.src, ctx.dst, ctx.options = src, dst, options
        shard = private.waited(dtensor.to_local())
        return dtensor_of(move_of(src, dst, shard, options)(shard), dst)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        src, mesh = private.spec_of(grad), ctx.src.device_mesh
        if ctx.dst.device_mesh != mesh:
            grad, src = _as_agreed(grad, ctx.dst, ctx.options)
        dst = Placed(mesh, _grad_placements(src, mesh, ctx.src.placements), grad.shape)
        return _applied(grad, src, dst, ctx.options), None, None, None


def _applied(dtensor: DTensor, src: Any, dst: Placed, options: Options) -> DTensor:
    moved: DTensor = _RedistributeDTensor.apply(dtensor, src, dst, options)  # type: ignore[no-untyped-call]
    return moved


def _as_agreed(grad: DTensor, dst: Placed, options: Options) -> tuple[DTensor, Placed]:
    """The gradient on placements that all ranks can compute, and these placements.

    Operators decide the placements of the gradient. Ranks outside ``dst`` cannot compute them,
    because DTensor runs no operators there.
    """
    placements = _grad_placements(None, dst.device_mesh, dst.placements)
    agreed = Placed(dst.device_mesh, placements, dst.shape)
    is_member = dst.device_mesh.get_coordinate() is not None
    if is_member and sharding_of_dtensor(grad) != sharding_of_dtensor(agreed):
        grad = _applied(grad, private.spec_of(grad), agreed, options)
    return grad, agreed


def _grad_placements(grad: Any, mesh: DeviceMesh, placements: Any) -> tuple[Placement, ...]:
    """The placements of a gradient: replicated where ``placements`` are partial, else the same.

    The gradient of a summand is the gradient of the sum. If ``grad`` itself is partial along that
    dim of the same mesh, it stays partial, as in DTensor.
    """
    is_partial = [False] * len(placements)
    if grad is not None and grad.device_mesh == mesh:
        is_partial = [placement.is_partial() for placement in grad.placements]
    return tuple(
        Replicate() if placement.is_partial() and not stays else placement
        for placement, stays in zip(placements, is_partial, strict=True)
    )


def dtensor_of(shard: Tensor, placed: Placed) -> DTensor:
    shape = torch.Size(placed.shape)
    # from_local takes the shape of a scalar from its local tensor, also where that is empty.
    local = shard if shape else shard.reshape(()) if shard.numel() else shard.new_empty(())
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, placed.device_mesh, placed.placements, run_check=False, shape=shape, stride=stride
    )
