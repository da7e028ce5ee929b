"""RankProgram: a program compiled for one rank; all views, splits and waits are computed once.

A program alternates between stages, which copy, add and wait in memory, and transfers, which the
backend does. On the CPU a stage is one call of the native core, on a GPU with the CUDA engine one
kernel launch per batch of copies. On other devices, or without the core, a stage is one tensor
operation per box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from hashlib import sha256
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor

from rvdcomm.collector import paused_collector
from rvdcomm.errors import CommError
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.native import core
from rvdcomm.program import Collective, Copy, Program, aligned
from rvdcomm.run.call_memory import CallMemory
from rvdcomm.run.cuda.staging import CudaStaging
from rvdcomm.run.in_place import Copies, InPlace, without
from rvdcomm.run.local import operation
from rvdcomm.run.messages import CompiledCollective
from rvdcomm.run.pool import pool_here
from rvdcomm.run.schedule import Action, Await, Do, Finish, Start, schedule
from rvdcomm.run.shared_memory.staging import SharedStaging, Staging, staging_of
from rvdcomm.run.stage import CudaStage, ShardStrides, native_stage
from rvdcomm.run.staging_memory import StagingMemory
from rvdcomm.run.waiting import of_block
from rvdcomm.run.world import World

Shards = Sequence[Tensor]
_CallStep = Callable[[CallMemory], None]
_Way = Callable[[Shards, ShardStrides, torch.device, StagingMemory], None]
_NO_ERROR: tuple[type[BaseException], ...] = ()
_PEER_ERROR = _NO_ERROR if core is None else core.PeerError


class RankProgram:
    """A program compiled for one rank.

    Construction and ``run`` are collective over the ranks of every group that the program uses.

    ``identity`` names the transition; it is equal on all ranks, though each rank has a program of
    its own.

    ``sent_bytes`` counts the bytes that the last run sent to other ranks, or let them read.
    ``peak_bytes`` counts the bytes that it held on this rank: shards, staging, and the contiguous
    copies of strided shards.

    Raises:
        SharedMemoryError: the ranks of a domain cannot share that much memory; on all of them.
        CommError: a rank of a group did not join.
    """

    def __init__(self, program: Program, identity: str, world: World) -> None:
        self.program, self.rank, self._world = program, world.rank, world
        self.sent_bytes = 0
        # A digest, because ranks compare it in every call.
        self._identity = int.from_bytes(sha256(identity.encode()).digest()[:8], "little")
        self._tag = 0
        self._posts = count(1)
        self._dtype: torch.dtype = getattr(torch, program.dtype)
        self._members = program.ranks
        self.names = program.shard_names(world.rank)
        group = next((group for group in program.peer_groups if world.rank in group), None)
        self._staging = staging_of(world, group)
        members = self._staging.ranks
        # Ranks that share a machine share its cores.
        self._num_threads = max(1, torch.get_num_threads() // len(members))
        self._staging.reserve({rank: program.arena(rank).num_bytes for rank in members})
        found = schedule(program, world.rank)
        self._totals = [found.totals[rank] for rank in members]
        # A rank that waits for each other rank in a call, or reads its memory, learns of those that
        # left before the call.
        awaited = {a.peer for a in found.actions if isinstance(a, Await) and a.count > 0}
        read = {i.src_rank for i in program.of_rank(world.rank) if isinstance(i, Copy)}
        self._checks_others = bool({*members} - awaited - read - {world.rank}) and group is not None
        self._parts = list(_parts(found.actions))
        self._in_place = _in_place(program, self._staging)
        self._transfers = self._compiled_transfers(0)
        self.peak_bytes = 0
        self._contiguous: ShardStrides = (None,) * len(self.names)
        self._held_bytes = program.arena(world.rank).num_bytes + sum(
            map(self._num_bytes, self.names)
        )
        # Bytes that others read from this rank are the same in every run; sent bytes are counted
        # when they are handed to the backend.
        self._read_bytes = program.item_bytes * sum(
            i.num_elements
            for i in program.of_rank(world.rank)
            if isinstance(i, Copy) and i.is_remote and i.src_rank == world.rank
        )
        # By the strides of shards, and by which ranks have a source that is read in place.
        self._native: dict[tuple[ShardStrides, tuple[bool, ...]], _NativeSteps] = {}
        self._cuda: dict[ShardStrides, list[Any]] = {}
        self._plain: list[_CallStep] | None = None
        self._ways: dict[torch.device, _Way] = {}

    def _compiled_transfers(self, identity: int) -> dict[int, CompiledCollective]:
        """The collectives of this rank; with an ``identity``, on communicators of their own."""
        return {
            id(one): CompiledCollective(self.program, one, self._world, tag, identity)
            for tag, one in _tagged(self.program.collectives)
            if self.rank in one.ranks
        }

    @cached_property
    def direct(self) -> frozenset[str]:
        """The shards that the backend itself reads or writes, which have to be contiguous."""
        mine = [one for one in self.program.collectives if self.rank in one.ranks]
        return frozenset(name for one in mine for name in one.buffers_of(self.rank))

    def run(self, shards: Shards, device: Any) -> None:
        """Read the src shards and write the dst shards.

        Args:
            shards: the tensors of ``program.shard_names(rank)``; dst shards in ``direct`` are
                contiguous.
            device: the device of the shards and of the staging memory.

        Raises:
            CommError: a peer is dead, late or gave up, or the group was destroyed.
        """
        strides = tuple([None if shard.is_contiguous() else shard.stride() for shard in shards])
        self.peak_bytes = self._held_bytes
        if strides != self._contiguous:
            self.peak_bytes += self._copied_bytes(strides)
        # The memory before ``begin``: a group that is destroyed refuses calls before it releases
        # its memory.
        world = self._world
        world.acquire()
        try:
            memory = self._staging.memory
            self._tag = world.begin(self._members, self._identity)
            way = self._ways.get(device) or self._way(device)
            try:
                way(shards, strides, device, memory)
                if self._checks_others:
                    self._staging.domain.check_all_began()
            except BaseException as error:
                self._fail(error)
                raise
            if world.failure:  # Another thread broke the group meanwhile.
                world.check()
        finally:
            world.release()

    def prepare_post(self) -> None:
        """Prepare ``post``; collective over the ranks of every group that the program uses."""
        _ = self._messages

    def post(self, shards: Shards) -> Callable[[], None]:
        """Begin a program that only sends and receives; the returned function waits for its end.

        Posted calls of each program are counted apart from all other calls. So ranks may post
        programs in different orders, and need not wait for calls that run in the background.

        Args:
            shards: contiguous tensors of ``program.shard_names(rank)``.

        Raises:
            CommError: the group failed before. The returned function raises it too: a peer is dead
                or late.
        """
        starts, finishes = self._messages
        self._world.check()
        tag = hash((self._identity, next(self._posts)))
        memory = dict(zip(self.names, shards, strict=True))
        # The arena is empty, but a backend takes only tensors on the device that it serves.
        nothing = torch.empty(0, dtype=torch.uint8, device=self._world.device)
        call = CallMemory(memory, nothing, tag, is_posted=True)
        self.peak_bytes = self._held_bytes
        self._each(starts, call)
        self.sent_bytes = call.sent_bytes
        return partial(self._each, finishes, call)

    @cached_property
    def _messages(self) -> tuple[list[_CallStep], list[_CallStep]]:
        """The functions that start, and that wait for, the messages of a program without stages.

        If messages have no tags (NCCL), the first read of this property is collective.
        """
        assert not self.program.arena(self.rank).num_bytes, "it needs no memory of its own"
        transfers = [part for part in self._parts if isinstance(part, Start | Finish)]
        assert len(transfers) == len(self._parts), "it does nothing but send and receive"
        found = self._transfers
        if not self._world.has_tags:
            found = self._compiled_transfers(self._identity)
        starts: list[_CallStep] = []
        finishes: list[_CallStep] = []
        for part in transfers:
            transfer = found[id(part.collective)]
            if isinstance(part, Start):
                starts.append(transfer.start)
            else:
                finishes.append(transfer.finish)
        return starts, finishes

    def _each(self, steps: Sequence[_CallStep], call: CallMemory) -> None:
        try:
            for step in steps:
                step(call)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Break the group because of an error in a call.

        Raises:
            CommError: what is behind the error, if the error does not say it itself.
        """
        if isinstance(error, _PEER_ERROR):
            error = self._staging.domain.comm_error(error, "a peer step")
        is_broken = bool(self._world.failure)
        self._world.fail(error)
        if is_broken and isinstance(error, Exception):
            # A call may meet any error where another thread has released what it uses.
            raise CommError(self._world.failure) from None
        if isinstance(error, CommError):
            raise error from None

    def _way(self, device: torch.device) -> _Way:
        """The method that runs programs on a device; kept, because ``device.type`` is slow."""
        if core is not None and device.type == "cpu":
            way: _Way = self._run_native
        elif core is not None and device.type == "cuda" and core.has_cuda:
            way = self._run_cuda
        else:
            way = self._run_plain
        self._ways[device] = way
        return way

    def _num_bytes(self, name: str) -> int:
        """The size of a shard of this rank."""
        num_elements = self.program.buffer[name, self.rank].num_elements
        return num_elements * ITEM_BYTES[self.program.dtype_of(name)]

    def _copied_bytes(self, strides: ShardStrides) -> int:
        """Bytes of strided shards that are copied, because the backend reads contiguous memory."""
        shards = zip(self.names, strides, strict=True)
        return sum(self._num_bytes(name) for name, one in shards if one and name in self.direct)

    # --- native ---------------------------------------------------------------------------------

    def _run_native(
        self, shards: Shards, strides: ShardStrides, _: torch.device, memory: StagingMemory
    ) -> None:
        if self._in_place is not None:
            self._run_in_place(shards, strides, self._in_place, memory)
            return
        native = self._native_steps(strides, (), memory)
        addresses = tuple([shard.data_ptr() for shard in shards])
        if native.alone is not None:
            native.alone.call(addresses, self._num_threads, self._identity, self._totals)
            self.sent_bytes = self._read_bytes
            return
        self._staging.begin_call(self._identity, 0)
        self._run_steps(native, shards, addresses, memory)
        self._staging.end_call(self._totals)

    def _run_in_place(
        self, shards: Shards, strides: ShardStrides, in_place: InPlace, memory: StagingMemory
    ) -> None:
        """Run a program in which ranks may read each other's sources in place."""
        staging = self._staging
        assert isinstance(staging, SharedStaging), "only domains read each other's sources"
        location = _location(shards[0]) if in_place.readers else 0
        staging.begin_call(self._identity, location)
        sources = staging.sources(in_place.owners, location)
        native = self._native_steps(strides, tuple(map(bool, sources)), memory)
        addresses = tuple([shard.data_ptr() for shard in shards])
        addresses = (*addresses, *sources) if any(sources) else addresses
        self._run_steps(native, shards, addresses, memory)
        if location:
            staging.wait_for(in_place.readers, self._totals)
        staging.end_call(self._totals)

    def _run_steps(
        self,
        native: _NativeSteps,
        shards: Shards,
        addresses: tuple[int, ...],
        memory: StagingMemory,
    ) -> None:
        call = self._call(shards, memory.own.view(self._dtype))
        for stage, transfer in native.steps:
            if stage is not None:
                stage(addresses, self._num_threads)
            else:
                transfer(call)
        self.sent_bytes = call.sent_bytes + self._read_bytes

    def _native_steps(
        self, strides: ShardStrides, in_place: tuple[bool, ...], memory: StagingMemory
    ) -> _NativeSteps:
        """The steps for these strides and sources, compiled on first use, bound to ``memory``."""
        native = self._native.get((strides, in_place))
        if native is None:
            native = self._native[strides, in_place] = self._compile(strides, in_place)
        staging = self._staging
        bound = memory.version, of_block()
        if native.bound != bound:
            assert not isinstance(staging, CudaStaging), "the caller chooses programs by device"
            for stage in native.stages:
                staging.bind(stage, memory)
            native.bound = bound
        return native

    def _call(self, shards: Shards, arena: Tensor) -> CallMemory:
        return CallMemory(dict(zip(self.names, shards, strict=True)), arena, self._tag)

    @paused_collector()
    def _compile(self, strides: ShardStrides, in_place: tuple[bool, ...]) -> _NativeSteps:
        members = self._staging.ranks
        copies: Copies = frozenset()
        if self._in_place is not None:
            copies = self._in_place.of_owners(compress(members, in_place))
        native = _NativeSteps()
        for part in self._parts:
            if isinstance(part, Start | Finish):
                native.steps.append((None, self._transfer(part)))
            else:
                left = without(part, self.program, self.rank, copies, len(self._parts) == 1)
                stage = native_stage(self.program, self.rank, members, left, strides, copies)
                native.stages.append(stage)
                native.steps.append((stage.run, None))
        if len(native.steps) == len(native.stages) == 1:
            native.alone = native.stages[0]
        return native

    def _transfer(self, part: Start | Finish) -> _CallStep:
        transfer = self._transfers[id(part.collective)]
        return transfer.start if isinstance(part, Start) else transfer.finish

    # --- CUDA -----------------------------------------------------------------------------------

    def _run_cuda(
        self, shards: Shards, strides: ShardStrides, device: torch.device, memory: StagingMemory
    ) -> None:
        """Queue all work on the caller's stream; nothing here waits for the GPU."""
        self._staging.begin_call(self._identity, 0)
        if strides not in self._cuda:
            self._cuda[strides] = [self._cuda_step(part, strides) for part in self._parts]
        staging, stream = self._staging, torch.cuda.current_stream(device)
        memory = self._memory_on(device, memory)
        call = self._call(shards, memory.own.view(self._dtype))
        addresses = [*(shard.data_ptr() for shard in shards), *memory.addresses]
        for step in self._cuda[strides]:
            if isinstance(step, CudaStage):
                step.run(addresses, stream, staging)
            else:
                step(call)
        self.sent_bytes = call.sent_bytes + self._read_bytes
        staging.end_call(self._totals)

    def _memory_on(self, device: torch.device, memory: StagingMemory) -> StagingMemory:
        """Staging memory on the device of the shards: ``memory`` if it is there, else a block."""
        if device.type == "cpu" or isinstance(self._staging, CudaStaging):
            return memory
        # A block per call is cheap: torch's allocator keeps freed memory, per stream.
        num_bytes = aligned(self.program.arena(self.rank).num_bytes)
        block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return StagingMemory(block, [block.data_ptr()])

    def _cuda_step(self, part: Any, strides: ShardStrides) -> Any:
        if isinstance(part, Start | Finish):
            return self._transfer(part)
        return CudaStage(self.program, self.rank, self._staging.ranks, part, strides)

    # --- plain ----------------------------------------------------------------------------------

    def _run_plain(
        self, shards: Shards, strides: ShardStrides, device: torch.device, memory: StagingMemory
    ) -> None:
        if self._plain is None:
            self._plain = list(self._plain_steps())
        call = self._call(shards, self._memory_on(device, memory).own.view(self._dtype))
        for step in self._plain:
            step(call)
        self.sent_bytes = call.sent_bytes

    def _plain_steps(self) -> Iterator[_CallStep]:
        for part in self._parts:
            if isinstance(part, Start | Finish):
                yield self._transfer(part)
            else:
                for action in part:
                    assert isinstance(action, Do), "domains need the native core"
                    yield operation(self.program, self.rank, action.instruction)


def _in_place(program: Program, staging: Staging) -> InPlace | None:
    """The sources that may be read in place; None if there are none."""
    if not isinstance(staging, SharedStaging) or not staging.domain.pools:
        return None
    found = InPlace.of(program, staging.rank, staging.ranks)
    return found if found.owners or found.readers else None


def _location(source: Tensor) -> int:
    """The location in the pool where others can read a source in place; 0 if they cannot."""
    pool = pool_here() if source.is_contiguous() else None
    return 0 if pool is None else pool.location(source.data_ptr(), source.nbytes)


def _tagged(collectives: Sequence[Collective]) -> Iterator[tuple[int, Collective]]:
    """Number the collectives of every group from 0; all ranks of a group count them alike."""
    counts: dict[tuple[int, ...], int] = {}
    for collective in collectives:
        tag = counts.get(collective.ranks, 0)
        counts[collective.ranks] = tag + 1
        yield tag, collective


class _NativeSteps:
    """The compiled steps of a program: native stages, and the transfers between them.

    In every step, either the ``run`` of a stage or the transfer is set, the other is None.
    ``alone`` is the only stage of a program without transfers. ``bound`` is the version of the
    staging memory and the limit of waiting to which the stages are bound.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any]] = []
        self.stages: list[Any] = []
        self.alone: Any = None
        self.bound: Any = None


def _parts(actions: Sequence[Action]) -> Iterator[Start | Finish | list[Action]]:
    """Split actions into transfers, and lists of the other actions between them."""
    run: list[Action] = []
    for action in actions:
        if isinstance(action, Start | Finish):
            if run:
                yield run
            run = []
            yield action
        else:
            run.append(action)
    if run:
        yield run
