"""Redistribute tensors between layouts on a process group: the functions that people call."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rvdcomm.errors import LayoutError
from rvdcomm.executors import results
from rvdcomm.executors.agreement import exchange_posts
from rvdcomm.executors.choice import compiled as compile_plan
from rvdcomm.executors.choice import executor_name
from rvdcomm.executors.rank_program import RankProgram
from rvdcomm.executors.world import World
from rvdcomm.layout import Layout, ranges_text
from rvdcomm.planner import Plan
from rvdcomm.request import (
    Request,
    check_in_group,
    check_tensors,
    known_shape,
    resolve,
    shard_shape,
)
from rvdcomm.topology import Topology


def redistribute(
    tensor: Tensor | None,
    src: Layout | str,
    dst: Layout | str,
    *,
    shape: tuple[int, ...] | None = None,
    group: Any = None,
    topology: Topology | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    dtype: torch.dtype | None = None,
    executor: str | None = None,
) -> Any:
    """Return this rank's shard under ``dst``, given its shard under ``src``.

    Collective over the ranks of ``src`` and ``dst``. The first call of a transition plans it and
    lets all ranks compare what they were asked for; later calls only run it, and trust that all
    ranks make the same calls in the same order. Where the global shape has to be inferred, every
    call compares.

    Args:
        tensor: this rank's shard, ``[*src.cell(rank).box.shape]``, maybe strided; never modified.
            None on a rank outside ``src``.
        src, dst: layouts over ranks of ``group``, or RVD texts: then over all its ranks.
        shape: global shape, in elements; if None, of the layouts or of all ranks' shards.
        group: process group; the default group if None.
        topology: who is near to whom; one host if None.
        out: where the result goes, ``[*dst.cell(rank).box.shape]``; allocated if None.
        async_op: return a ``Pending`` at once; its ``wait()`` returns the shard.
        dtype: needed on a rank that passes None where calls of one transition differ in dtype.
        executor: "dist" sends messages only, "peer" also reads the memory of ranks of one host,
            "auto" does that where it can; if None, ``RVDCOMM_EXECUTOR``, or "auto".

    Returns:
        Tensor ``[*dst.cell(rank).box.shape]``, same dtype and device as ``tensor``; None on a rank
        outside ``dst``. It carries no autograd graph.

    Raises:
        LayoutError: the request is illegal, or ranks disagree about it.
        ShapeMismatchError: some rank's shard is not what ``src`` gives it. Both come on every rank
            of the first call; in a later one on the rank at fault, and the others time out.
        CommError: a peer failed, or did not join within the group's timeout.
    """
    world = World.of(group)
    # What every rank can know of the transition: those that agreed once compare texts no more.
    key = (src, dst, shape, topology, *_signature(tensor), dtype, executor)
    compiled: Redistributor | None = world.agreed.get(key)
    if compiled is None:
        request = _request(tensor, src, dst, shape, topology, out, dtype, executor_name(executor))
        compiled = _agreed(request, src, dst, topology, group)
        # A shape that is inferred depends on other ranks' shards, which this rank does not know.
        if known_shape(src, dst, shape) is not None:
            world.agreed[key] = compiled
    else:
        compiled._check(tensor, out)
    return compiled._start(tensor, out, async_op)


def redistribute_many(
    tensors: Mapping[str, Tensor | None],
    src: Mapping[str, Layout | str],
    dst: Mapping[str, Layout | str],
    *,
    group: Any = None,
    topology: Topology | None = None,
) -> dict[str, Any]:
    """Redistribute every tensor of a state dict, one after another in the order of names.

    Args and errors are those of ``redistribute``; all three mappings have the same names, on all
    ranks.

    Raises:
        LayoutError: the mappings differ in their names.
    """
    if not set(tensors) == set(src) == set(dst):
        odd = sorted(set(tensors) ^ set(src) | set(tensors) ^ set(dst))
        raise LayoutError(f"redistribute_many: tensors, src and dst differ in the names {odd[:5]}.")
    return {
        name: redistribute(tensors[name], src[name], dst[name], group=group, topology=topology)
        for name in sorted(tensors)
    }


class Redistributor:
    """A plan compiled for this rank of ``group``: made once, called often.

    Making it is collective over the ranks of the plan, and so is each call. Ranks must agree on the
    plan; ``redistribute`` checks that, this class trusts its caller.

    Args:
        plan, group, executor: as of ``redistribute``.

    Raises:
        LayoutError: the plan has ranks outside the group.
        CommError: a rank did not join, or ``executor="peer"`` cannot be had.
    """

    def __init__(self, plan: Plan, group: Any = None, *, executor: str | None = None) -> None:
        self.plan = plan
        self._world = World.of(group)
        self._device = self._world.device
        self._rank = self._world.rank
        self._what = f"redistribute {plan.src.rvd} -> {plan.dst.rvd}"
        check_in_group((*plan.src.ranks, *plan.dst.ranks), self._world.size, self._what)
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._src_shape = shard_shape(plan.src, self._rank)
        self._dst_shape = shard_shape(plan.dst, self._rank)
        self._program = compile_plan(plan, self._world, executor_name(executor))
        self._messages: RankProgram | None = None

    def __call__(
        self, tensor: Tensor | None, *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """Run the plan; arguments and result as of ``redistribute``."""
        self._check(tensor, out)
        return self._start(tensor, out, async_op)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the last call sent to other ranks, or let them read here."""
        return self._program.sent_bytes

    def _check(self, tensor: Tensor | None, out: Tensor | None) -> None:
        """Raise, on this rank alone, for tensors that are not what the plan gives it."""
        is_mine = (
            (None if tensor is None else tensor.shape) == self._src_shape
            and (tensor is None or tensor.dtype == self._dtype)
            and (out is None or (out.shape, out.dtype) == (self._dst_shape, self._dtype))
        )
        if not is_mine:
            request = _request(tensor, self.plan.src, self.plan.dst, None, None, out, None, "")
            check_tensors(self.plan, self._rank, request)
        misuse = _misuse(tensor, out)
        if misuse:
            raise LayoutError(f"{self._what}: rank {self._rank}: {misuse}")

    def _start(self, tensor: Tensor | None, out: Tensor | None, async_op: bool) -> Any:
        if async_op:
            return Pending(_worker().submit(self._run, tensor, out, _stream(tensor)))
        # Calls that still run must come first: ranks have to issue collectives in one order.
        if _worker.cache_info().currsize:
            _worker().submit(lambda: None).result()
        return self._run(tensor, out, None)

    def _run(self, tensor: Tensor | None, out: Tensor | None, stream: Any) -> Tensor | None:
        if stream is not None:
            torch.cuda.set_stream(stream)
        given = tensor if tensor is not None else out
        device = self._device if given is None else given.device
        program = self._program_for(device)
        if out is None or not out.requires_grad:
            return self._moved(program, tensor, out, device)
        with torch.no_grad():
            return self._moved(program, tensor, out, device)

    def _moved(
        self, program: RankProgram, tensor: Tensor | None, out: Tensor | None, device: torch.device
    ) -> Tensor | None:
        if tensor is not None and (tensor.is_conj() or tensor.is_neg()):
            # Lazily conjugated or negated, it has no bytes of its own until it is resolved.
            tensor = tensor.resolve_conj().resolve_neg()
        if self._dst_shape is None:
            program.run(tensor, None, self._dtype, device)
            return None
        if out is not None and out.is_contiguous():
            program.run(tensor, out, self._dtype, device)
            return out
        result = results.empty(self._dst_shape, self._dtype, device)
        program.run(tensor, result, self._dtype, device)
        return result if out is None else out.copy_(result)

    def _program_for(self, device: torch.device) -> RankProgram:
        """The program, or one of messages alone for a device whose memory is not shared."""
        if device == self._device or not self._program.program.peer_groups:
            return self._program
        if self._messages is None:
            self._messages = RankProgram(self.plan.program, self._world)
        return self._messages


@dataclass(frozen=True)
class Pending:
    """A call that was started with ``async_op=True``."""

    future: Future[Tensor | None]

    def wait(self) -> Tensor | None:
        """Wait for the call and return its result, or raise its error."""
        return self.future.result()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.future.done()


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    """The one thread that runs all asynchronous calls of this process, in the order they came."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rvdcomm")


def _stream(tensor: Tensor | None) -> Any:
    """The caller's CUDA stream, on which the worker has to go on."""
    return torch.cuda.current_stream() if tensor is not None and tensor.is_cuda else None


def _request(
    tensor: Tensor | None,
    src: Layout | str,
    dst: Layout | str,
    shape: tuple[int, ...] | None,
    topology: Topology | None,
    out: Tensor | None,
    dtype: torch.dtype | None,
    executor: str,
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
        misuse=_misuse(tensor, out),
    )


def _misuse(tensor: Tensor | None, out: Tensor | None) -> str | None:
    """What is wrong with tensors that would lose a gradient or be overwritten."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        return (
            "the tensor requires grad, and redistribute carries no gradient; pass "
            "tensor.detach(), or call it under torch.no_grad()."
        )
    if tensor is not None and out is not None and tensor.numel() and _same_storage(tensor, out):
        return "out shares memory with the tensor; give another out."
    return None


def _signature(tensor: Tensor | None) -> tuple[Any, Any]:
    return (None, None) if tensor is None else (tensor.shape, tensor.dtype)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _agreed(
    request: Request, src: Layout | str, dst: Layout | str, topology: Topology | None, group: Any
) -> Redistributor:
    """Compare the requests of all ranks, and compile the plan that follows from them."""
    world = World.of(group)
    joined = _members(src, dst, world)
    if world.rank not in joined:
        raise LayoutError(
            f"{request}: rank {world.rank} called it but is in neither layout, which have "
            f"ranks {ranges_text(joined)}."
        )
    posts = exchange_posts(world, joined, request.to_json(), str(request))
    requests = {rank: Request.from_json(post) for rank, post in posts.items()}
    made = resolve(requests, src, dst, topology, world.size)
    key = made, request.executor
    if key not in world.compiled:
        world.compiled[key] = Redistributor(made, group, executor=request.executor)
    found: Redistributor = world.compiled[key]
    return found


def _members(src: Layout | str, dst: Layout | str, world: World) -> tuple[int, ...]:
    """Ranks that have to join: those of the layouts, or all if a layout is a text."""
    ranks: set[int] = set()
    for layout in (src, dst):
        ranks |= set(layout.ranks) if isinstance(layout, Layout) else set(range(world.size))
    return tuple(sorted(rank for rank in ranks if rank < world.size))
