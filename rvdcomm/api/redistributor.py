"""Redistributor: a plan that was compiled for one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rvdcomm.api.gradient import with_grad
from rvdcomm.api.inspect import grad_flows, request_of
from rvdcomm.api.pending import drain, posted, submit
from rvdcomm.api.tensors import fault_of_mode, misuse_of, place_within, resolved, written
from rvdcomm.api.traced import breaks_graph, runs_whole
from rvdcomm.errors import LayoutError
from rvdcomm.plans import planner
from rvdcomm.plans.adjoint import adjoint, check_replica_grads
from rvdcomm.plans.plan import Plan
from rvdcomm.plans.planner import plan_over, plan_with
from rvdcomm.program import Program
from rvdcomm.run import pool
from rvdcomm.run.choice import executor_name, plan_here
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.request import (
    check_grad,
    check_in_group,
    check_tensors,
    kept_place,
    shard_shape,
)
from rvdcomm.run.world import World


class Redistributor:
    """A plan compiled for this rank of ``group``, to be called many times.

    The constructor is collective over the ranks of the plan, and so is each call. All ranks must
    have the same plan: ``redistribute`` checks that, this class does not.

    Args:
        plan: the plan to run. If ranks cannot read each other's memory as it says, all ranks plan
            again for what is possible here; the attribute ``plan`` is the one that runs.
        group, executor, memory_limit, replica_grads: as of ``redistribute``; the executor and the
            limit are those of the plan if None is given.
        device: where the tensors of all ranks will be. It matters in a group with several backends
            (``cpu:gloo,cuda:nccl``); the default there is this process's GPU.

    Attributes:
        peak_bytes: bytes that the last call held on this rank: its shards and all buffers.

    Raises:
        LayoutError: the plan has ranks outside the group.
        MemoryLimitError: no plan that is possible here fits the limit; on all ranks.
        CommError: a rank did not join, or ``executor="peer"`` is not possible here.
    """

    @breaks_graph
    def __init__(
        self,
        plan: Plan,
        group: Any = None,
        *,
        executor: str | None = None,
        memory_limit: int | None = None,
        replica_grads: str = "parts",
        device: str | torch.device | None = None,
    ) -> None:
        self.what = f"redistribute {plan.src.rvd} -> {plan.dst.rvd}"
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.group, self.replica_grads = group, replica_grads
        self.executor = executor_name(executor, plan.executor)
        self._world = World.of(group)
        if device is not None:
            self._world = self._world.on(torch.device(device).type)
        self._device = self._world.device
        self._rank = self._world.rank
        check_replica_grads(replica_grads)
        if (fault := fault_of_mode()) is not None:
            raise LayoutError(f"{self.what}: {fault}")
        check_in_group((*plan.src.ranks, *plan.dst.ranks), self._world.size, self.what)
        self._src_shape = shard_shape(plan.src, self._rank)
        self._dst_shape = shard_shape(plan.dst, self._rank)
        self._kept_place = kept_place(plan.src, plan.dst, self._rank)
        self._asked = plan_with(plan, memory_limit=memory_limit)
        with self._world.together(plan.path.ranks):
            self.plan = plan_here(self._asked, self._world, self.executor)
            self._program = _compiled(self.plan, self._world)
        self._programs: dict[torch.device, RankProgram] = {}
        self._may_post = self._world.has_tags
        self.peak_bytes = 0

    @runs_whole
    def __call__(
        self,
        tensor: Tensor | None,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        requires_grad: bool | None = None,
    ) -> Any:
        """Run the plan; arguments and result as of ``redistribute``.

        A rank that passes None cannot see whether a gradient flows back, so it has to pass
        ``requires_grad``.
        """
        if is_dynamo_compiling():
            from rvdcomm.api import compiled

            return compiled.call_redistributor(self, tensor, out, async_op, requires_grad)
        self.check(tensor, out)
        if requires_grad is None and (tensor is None or not tensor.requires_grad):
            return self.start(tensor, out, async_op)
        grad = bool(grad_flows(tensor, requires_grad))
        if grad:
            self.check_grad(out, requires_grad)
        return self.start(tensor, out, async_op, grad)

    @property
    def program(self) -> Program:
        """The program that calls run, for all ranks."""
        return self._program.program

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank that others received in the last call, by message or by reading."""
        return self._program.sent_bytes

    # --- gradients ------------------------------------------------------------------------------

    @cached_property
    def adjoint(self) -> Redistributor:
        """The adjoint, which carries gradients back. Collective when it is first read."""
        src, dst = adjoint(self.plan.src, self.plan.dst, self.replica_grads)
        made = Redistributor(
            planner.plan(
                src,
                dst,
                self.plan.dtype,
                self.plan.topology,
                self.plan.memory_limit,
                executor=self.executor,
            ),
            self.group,
            executor=self.executor,
            replica_grads=self.replica_grads,
            device=self._device,
        )
        made.adjoint, made.spans_groups = self, self.spans_groups
        return made

    @cached_property
    def spans_groups(self) -> bool:
        """Whether some ranks have a tensor on one side only."""
        return set(self.plan.src.ranks) != set(self.plan.dst.ranks)

    @property
    def is_in_src(self) -> bool:
        """Whether this rank passes a tensor."""
        return self._src_shape is not None

    @property
    def is_in_dst(self) -> bool:
        """Whether this rank gets a result."""
        return self._dst_shape is not None

    # --- calls ----------------------------------------------------------------------------------

    def check(self, tensor: Any, out: Any) -> None:
        """Raise, on this rank alone, for tensors that cannot be used or do not fit the plan."""
        misuse = misuse_of(tensor, out)
        if misuse is not None:
            raise LayoutError(f"{self.what}: rank {self._rank}: {misuse}")
        self.check_shards(tensor, out)

    def check_shards(self, tensor: Tensor | None, out: Tensor | None) -> None:
        """Raise, on this rank alone, for tensors that do not fit the plan."""
        is_mine = (
            (None if tensor is None else tensor.shape) == self._src_shape
            and (tensor is None or tensor.dtype == self.dtype)
            and (out is None or (out.shape, out.dtype) == (self._dst_shape, self.dtype))
            and place_within(tensor, out) in (None, self._kept_place)
        )
        if not is_mine:
            request = request_of(tensor, self.plan.src, self.plan.dst, out)
            check_tensors(self.plan, self._rank, request)

    def check_grad(self, out: Tensor | None, requires_grad: bool | None) -> None:
        """Raise, on this rank alone, if no gradient can flow back through this call."""
        check_grad(self.plan, self._rank, out is not None, bool(requires_grad), self.what)

    def start(
        self, tensor: Tensor | None, out: Tensor | None, async_op: bool, grad: bool = False
    ) -> Any:
        """Run the plan now or in the background; ``grad`` says whether a gradient flows back."""
        if grad:
            return self._start_with_grad(tensor, async_op)
        if async_op:
            device = self._device_of(tensor if tensor is not None else out)
            if self.is_posted and device.type == self._device.type:
                return posted(self._post(tensor, out, device), device, self._world)
            return submit(partial(self._run, tensor, out), device, (tensor, out))
        drain()
        return self._run(tensor, out)

    def running(self, tensor: Tensor | None) -> Callable[[], Tensor | None]:
        """A function that runs the plan."""
        return partial(self.start, tensor, None, False)

    def _start_with_grad(self, tensor: Tensor | None, async_op: bool) -> Any:
        if not async_op:
            return with_grad(tensor, self.running(tensor), self)
        # The node is made now and its values come later. So all ranks make their nodes in the
        # order of the calls, whatever the order of their waits.
        device = self._device_of(tensor)
        room = None if self._dst_shape is None else self._empty(device)
        result = with_grad(tensor, lambda: room, self)

        def run() -> Any:
            self._run(tensor, room)
            return result

        return submit(run, device, (tensor, room))

    def _run(self, tensor: Tensor | None, out: Tensor | None) -> Tensor | None:
        device = self._device_of(tensor if tensor is not None else out)
        program = self._programs.get(device) or self._program_on(device)
        if (tensor is None or not tensor.requires_grad) and (out is None or not out.requires_grad):
            return self._moved(program, tensor, out, device)
        with torch.no_grad():
            return self._moved(program, tensor, out, device)

    def prepare_post(self) -> None:
        """Prepare calls with ``async_op=True`` to run as messages alone, if the plan allows that.

        Collective over the ranks of the plan. gloo needs no preparation. NCCL needs a communicator
        that nothing else uses, which takes time and memory. This pays off for a transition that
        runs many times, as between the stages of a pipeline.
        """
        if self._is_messages:
            self._program.prepare_post()
            self._may_post = True

    @property
    def is_posted(self) -> bool:
        """Whether a call with ``async_op=True`` is messages alone, from tensor to tensor.

        Nothing has to be done between the messages, so no thread has to wait for them. Calls of
        different transitions need not begin in one order on all ranks: a rank may post a receive
        long before the others send. With NCCL this holds only after ``prepare_post``.
        """
        return self._may_post and self._is_messages

    @cached_property
    def _is_messages(self) -> bool:
        """Whether the plan only sends whole shards to other ranks, and shares no memory.

        All ranks get the same answer.
        """
        plan = self.plan
        is_sent = [step.kind for step in plan.path.steps] == ["transfer"]
        return is_sent and plan.src.rvd == plan.dst.rvd and not plan.domains

    def _post(
        self, tensor: Tensor | None, out: Tensor | None, device: torch.device
    ) -> Callable[[], Tensor | None]:
        """Begin to send or receive; the returned function waits for that and returns the result."""
        given = None if tensor is None else resolved(tensor.detach()).contiguous()
        is_direct = out is not None and out.is_contiguous()
        shards = [] if given is None else [given]
        if self._dst_shape is not None:
            shards.append(out.detach() if out is not None and is_direct else self._empty(device))
        finish = self._program.post(shards)

        def wait() -> Tensor | None:
            finish()
            self.peak_bytes = self._program.peak_bytes
            if self._dst_shape is None or out is None:
                return None if self._dst_shape is None else shards[-1]
            if is_direct:
                return written(out)
            with torch.no_grad():
                return out.copy_(shards[-1])

        return wait

    def _moved(
        self, program: RankProgram, tensor: Tensor | None, out: Tensor | None, device: torch.device
    ) -> Tensor | None:
        shards = [] if tensor is None else [resolved(tensor)]
        is_direct = out is not None and out.is_contiguous()
        if self._dst_shape is not None:
            shards.append(out if out is not None and is_direct else self._empty(device))
        program.run(shards, device)
        self.peak_bytes = program.peak_bytes
        if self._dst_shape is None:
            return None
        if out is None:
            return shards[-1]
        if is_direct:
            return written(out)
        self.peak_bytes += out.nbytes
        return out.copy_(shards[-1])

    def _empty(self, device: torch.device) -> Tensor:
        assert self._dst_shape is not None
        return pool.empty(self._dst_shape, self.dtype, device)

    def _device_of(self, given: Tensor | None) -> torch.device:
        return self._device if given is None else given.device

    def _program_on(self, device: torch.device) -> RankProgram:
        """The program for a device; one of messages alone if its memory is not shared.

        Collective if another backend of the group moves its tensors.
        """
        world = self._world.on(device.type)
        with world.held():
            if world is not self._world:
                found = _compiled(plan_here(self._asked, world, self.executor), world)
            else:
                is_shared = device == self._device or not self.plan.domains
                found = self._program if is_shared else self._messages
            self._programs[device] = found
        return found

    @cached_property
    def _messages(self) -> RankProgram:
        """A program without shared memory; collective when it is first read."""
        return _compiled(plan_over(self.plan, ()), self._world)


def _compiled(plan: Plan, world: World) -> RankProgram:
    return RankProgram(plan.program_of(world.rank), plan.identity, world)
