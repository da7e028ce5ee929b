"""Redistributor: a plan compiled for one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rvdcomm.api.inspect import misuse_of, request_of
from rvdcomm.api.pending import drain, submit
from rvdcomm.errors import LayoutError
from rvdcomm.executors import results
from rvdcomm.executors.choice import compiled as compile_plan
from rvdcomm.executors.choice import executor_name
from rvdcomm.executors.rank_program import RankProgram
from rvdcomm.executors.world import World
from rvdcomm.planner import Plan
from rvdcomm.request import check_in_group, check_tensors, shard_shape


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
        self.check(tensor, out)
        return self.start(tensor, out, async_op)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the last call sent to other ranks, or let them read here."""
        return self._program.sent_bytes

    def check(self, tensor: Tensor | None, out: Tensor | None) -> None:
        """Raise, on this rank alone, for tensors that are not what the plan gives it."""
        is_mine = (
            (None if tensor is None else tensor.shape) == self._src_shape
            and (tensor is None or tensor.dtype == self._dtype)
            and (out is None or (out.shape, out.dtype) == (self._dst_shape, self._dtype))
        )
        if not is_mine:
            request = request_of(tensor, self.plan.src, self.plan.dst, None, None, out, None, "")
            check_tensors(self.plan, self._rank, request)
        misuse = misuse_of(tensor, out)
        if misuse:
            raise LayoutError(f"{self._what}: rank {self._rank}: {misuse}")

    def start(self, tensor: Tensor | None, out: Tensor | None, async_op: bool) -> Any:
        if async_op:
            return submit(self._run, tensor, out, _stream(tensor))
        drain()
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
        given = () if tensor is None else (tensor,)
        if self._dst_shape is None:
            program.run(given, device)
            return None
        if out is not None and out.is_contiguous():
            program.run((*given, out), device)
            return out
        result = results.empty(self._dst_shape, self._dtype, device)
        program.run((*given, result), device)
        return result if out is None else out.copy_(result)

    def _program_for(self, device: torch.device) -> RankProgram:
        """The program, or one of messages alone for a device whose memory is not shared."""
        if device == self._device or not self._program.program.peer_groups:
            return self._program
        if self._messages is None:
            self._messages = RankProgram(self.plan.program, self._world)
        return self._messages


def _stream(tensor: Tensor | None) -> Any:
    """The caller's CUDA stream, on which the worker has to go on."""
    return torch.cuda.current_stream() if tensor is not None and tensor.is_cuda else None
