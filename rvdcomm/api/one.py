"""redistribute: one tensor, from the layout that it has to the one that its next reader needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rvdcomm.api.inspect import backend_of, grad_flows, has_agreed, request_of
from rvdcomm.api.options import AS_USUAL, CallOptions, OfOne, filled
from rvdcomm.api.redistributor import Redistributor
from rvdcomm.api.tensors import misuse_of
from rvdcomm.api.traced import runs_whole
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout, ranges_text
from rvdcomm.run.agree import Post, exchange_posts
from rvdcomm.run.request import (
    TransitionRequest,
    check_in_group,
    common_device,
    known_shape,
    needs_grad,
    resolve,
)
from rvdcomm.run.world import World


@runs_whole
def redistribute(
    tensor: Tensor | None,
    src: Layout | str,
    dst: Layout | str,
    *,
    out: Tensor | None = None,
    async_op: bool = False,
    options: CallOptions = AS_USUAL,
    **by_name: Unpack[OfOne],
) -> Any:
    """Return this rank's shard under ``dst``, given its shard under ``src``.

    Collective over the ranks of ``src`` and ``dst``. The first call of a transition plans it and
    lets all ranks compare what they were asked for; later calls only run it, and trust that all
    ranks make the same calls in the same order. Where the global shape has to be inferred (both
    layouts are texts without a shape, and ``shape`` is not given), every call compares: the shards
    of other ranks may have changed.

    Args:
        tensor: this rank's shard, ``[*src.cell(rank).box.shape]``, maybe strided; never modified.
            None on a rank outside ``src``.
        src, dst: layouts over ranks of ``group``, or RVD texts, which mean all ranks of ``group``.
        out: tensor for the result, ``[*dst.cell(rank).box.shape]``; allocated if None. ``tensor``
            may be the part of ``out`` that keeps its values, as in an all-gather in place.
        async_op: return a ``Pending`` at once; its ``wait()`` returns the shard.
        options: the following options as one value, for many calls.
        shape: global shape, in elements; if None, taken from a layout or inferred from the shards.
        group: process group; the default group if None.
        topology: the hosts and links of the ranks; one host if None.
        dtype: needed on a rank that passes None if calls of one transition differ in dtype.
        executor: "dist" sends messages only, "peer" also reads the memory of ranks of one host,
            "auto" does that where it can; if None, ``RVDCOMM_EXECUTOR``, or "auto".
        memory_limit: bytes that the buffers of no rank may exceed, its src and dst shards included;
            the backward pass keeps the limit too.
        requires_grad: whether a gradient flows back (docs/gradients.md). If None, it does if
            ``tensor`` requires grad, which must be equal on all ranks of ``src``. The argument is
            needed if some rank of ``src`` is outside ``dst``, and on a rank that passes None if
            calls of one transition differ in it. Under ``torch.no_grad()`` no gradient flows.
        replica_grads: how gradients of replicas relate to the gradient of the tensor: "parts" that
            add up to it, or equal "copies" of it.

    Returns:
        Tensor ``[*dst.cell(rank).box.shape]``, same dtype and device as ``tensor``; None on a rank
        outside ``dst``. With ``requires_grad=True`` such a rank gets a scalar of 0 whose
        ``backward()`` takes part in the backward pass.

    Raises:
        LayoutError: the request is illegal, or ranks disagree about it.
        ShapeMismatchError: some rank's shard is not what ``src`` gives it. In the first call, every
            rank raises this error or the LayoutError. In a later call only the rank at fault
            raises, and the others time out.
        MemoryLimitError: no plan fits ``memory_limit``; on every rank.
        CommError: a peer failed, or did not join within the group's timeout.
    """
    asked = filled("redistribute", options, by_name)
    if is_dynamo_compiling():
        from rvdcomm.api import compiled

        return compiled.call(redistribute, tensor, src, dst, out, async_op, asked)
    world = World.of(asked.group)
    transition = src, dst, asked.shape, asked.topology
    misuse = misuse_of(tensor, out)
    if misuse is not None and has_agreed(world, transition):
        raise LayoutError(f"redistribute {src} -> {dst}: rank {world.rank}: {misuse}")
    grad = None if misuse else grad_flows(tensor, asked.requires_grad)
    # All that one rank knows of the call: ranks that agreed on a key once compare nothing again.
    # The group is no part of it, as every group has its world.
    said = asked.dtype, asked.executor, asked.memory_limit, asked.requires_grad, asked.replica_grads
    backend = None if misuse or world.has_one_backend else backend_of(world, tensor, out)
    key = (*transition, *_signature(None if misuse else tensor), grad, backend, said)
    redistributor, grad = _agreed_before(world, key)
    if redistributor is None or misuse:
        request = request_of(tensor, src, dst, out, asked, misuse=misuse)
        redistributor, grad = _agreed(world, request, key, src, dst, asked)
    else:
        redistributor.check_shards(tensor, out)
        if grad:
            redistributor.check_grad(out, asked.requires_grad)
    return redistributor.start(tensor, out, async_op, grad)


def _signature(tensor: Tensor | None) -> tuple[Any, Any]:
    return (None, None) if tensor is None else (tensor.shape, tensor.dtype)


def _agreed_before(world: World, key: tuple[Any, ...]) -> tuple[Redistributor | None, bool]:
    """The plan that ranks agreed on in an earlier call, and whether a gradient flows back."""
    try:
        found: tuple[Redistributor | None, bool] = world.agreed.get(key, (None, False))
    except TypeError:  # An argument of a wrong type has no hash; the request reports it.
        return None, False
    return found


def _agreed(
    world: World,
    request: TransitionRequest,
    key: tuple[Any, ...],
    src: Layout | str,
    dst: Layout | str,
    asked: CallOptions,
) -> tuple[Redistributor, bool]:
    """The plan that all ranks agree on, and whether a gradient flows back; collective."""
    joined = _members(src, dst, world)
    if world.rank not in joined:
        named = [rank for side in (src, dst) if isinstance(side, Layout) for rank in side.ranks]
        check_in_group(tuple(named), world.size, str(request))
        raise LayoutError(
            f"{request}: rank {world.rank} called it but is in neither layout, which have "
            f"ranks {ranges_text(joined)}."
        )
    with world.alone():
        posts = exchange_posts(world, joined, request.to_json(), str(request))
        # A shape that is inferred depends on the shards of other ranks, so every call compares.
        # What was posted before is known to all ranks or to none: the rest is done together.
        posted = json.dumps(sorted(posts.items()))
        made: tuple[Redistributor, bool] | None = world.compiled.get(posted)
        if made is None:
            with world.together(joined):
                made = _compiled(world, request, posts, src, dst, asked)
            world.compiled[posted] = made
    if known_shape(src, dst, request.shape) is not None:
        world.agreed[key] = made
    return made


def _compiled(
    world: World,
    request: TransitionRequest,
    posts: Mapping[int, Post],
    src: Layout | str,
    dst: Layout | str,
    asked: CallOptions,
) -> tuple[Redistributor, bool]:
    """The compiled plan that all ranks asked for, and whether a gradient flows back; collective.

    The adjoint is compiled here too, because all ranks take part in this call.
    """
    requests = {rank: TransitionRequest.from_json(post) for rank, post in posts.items()}
    made = resolve(requests, src, dst, asked.topology, world.size)
    grad = needs_grad(requests, made)
    devices = {rank: request.device for rank, request in requests.items()}
    device = common_device(devices, world.member, str(request)) or world.device.type
    key = made, request.executor, request.replica_grads, world.on(device).backend
    if key not in world.compiled:
        world.compiled[key] = Redistributor(
            made,
            asked.group,
            executor=request.executor,
            replica_grads=request.replica_grads,
            device=device,
        )
    found: Redistributor = world.compiled[key]
    if grad:
        _ = found.adjoint
    return found, grad


def _members(src: Layout | str, dst: Layout | str, world: World) -> tuple[int, ...]:
    """Ranks that have to join: all ranks of the layouts, or of the group if a layout is a text."""
    ranks: set[int] = set()
    for layout in (src, dst):
        ranks |= set(layout.ranks) if isinstance(layout, Layout) else set(range(world.size))
    return tuple(sorted(rank for rank in ranks if rank < world.size))
