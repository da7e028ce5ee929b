"""Transports: move tensors between ranks through ``rvdcomm``; this package has no network code."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import SubTransfer

CPU = torch.device("cpu")


class Handle(Protocol):
    """A move that was started."""

    def wait(self) -> Tensor | None:
        """This rank's shard at the dst end; None if it has none."""


class TransportCall(Protocol):
    """A sub-transfer that is prepared once and moved many times."""

    def move(self, tensor: Tensor | None) -> Tensor | None:
        """Move a tensor and wait for it."""

    def start(self, tensor: Tensor | None) -> Handle:
        """Move a tensor in the background."""

    def expect(self) -> None:
        """Post the receives of the next ``start`` now, if this needs no other rank.

        Only call this if that start will certainly follow, and if this rank contributes nothing.
        """

    def forget(self) -> None:
        """Cancel ``expect``: the start will not follow."""


class ManyHandle(Protocol):
    """Moves that were started together."""

    def wait(self) -> dict[str, Tensor | None]:
        """This rank's shards at the dst ends by name; None where it has none."""


class Transport(Protocol):
    """Moves tensors along sub-transfers; collective over the ranks of a sub-transfer, in one order
    on all ranks.
    """

    rank: int

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The numbers that its ranks have among all processes of the job."""

    def call(self, sub_transfer: SubTransfer) -> TransportCall:
        """Prepare a sub-transfer; collective when the sub-transfer is first used."""

    def move_many(
        self, sub_transfers: Mapping[str, SubTransfer], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """Move tensors by name; all sub-transfers have the same ranks."""

    def start_many(
        self, sub_transfers: Mapping[str, SubTransfer], tensors: Mapping[str, Tensor]
    ) -> ManyHandle:
        """Move tensors by name in the background."""

    def fail(self, error: BaseException) -> None:
        """Let all ranks raise, at the latest in their next move: this one does not go on.

        Law (tests/dist/test_step_faults.py): no rank gets a value of another step than its own.
        """

    def restart(self, text: str) -> list[str]:
        """Let ranks move tensors again after ``fail``; collective over all ranks.

        Returns:
            What every rank gave as ``text``, in the order of ranks.
        """

    def tell(self, text: str) -> None:
        """Leave a text for the other ranks, in place of the one before; waits for nobody."""

    def told(self) -> dict[int, str]:
        """The last text of every rank that left one; it can be read after a failure too."""

    def rows(self, row: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The rows of ranks, ``[elements]`` each, as ``[ranks, elements]``; collective over them.

        It is for the few numbers by which ranks agree, which are no data of a program. They are on
        the CPU.
        """


class DistTransport:
    """Moves tensors with ``rvdcomm`` over ``torch.distributed``, on one rank of a process group."""

    def __init__(
        self, rank: int, group: Any = None, topology: rv.Topology | rv.Network | None = None
    ) -> None:
        self.rank, self._group, self._topology = rank, group, topology
        self._calls: dict[SubTransfer, DistCall] = {}
        self._rows: dict[tuple[tuple[int, ...], int, torch.dtype], DistCall] = {}

    def rows(self, row: Tensor, ranks: tuple[int, ...]) -> Tensor:
        key = ranks, len(row), row.dtype
        if key not in self._rows:
            num = len(ranks)
            form = f"shape({num},{len(row)}) ranks({','.join(map(str, ranks))})"
            src, dst = f"R(1)V(1)D({num},1) {form}", f"R({num})V(1)D(1,1) {form}"
            sub_transfer = SubTransfer("[]", src, dst, str(row.dtype).removeprefix("torch."))
            self._rows[key] = self.call(sub_transfer)
        found = self._rows[key].move(row[None].to(self._place))
        assert found is not None, "every rank gets the rows"
        return found.cpu()

    @property
    def global_ranks(self) -> tuple[int, ...]:
        if not dist.is_initialized():
            return (self.rank,)
        return tuple(dist.get_process_group_ranks(self._group))

    def tell(self, text: str) -> None:
        rv.tell(text, self._group)

    def told(self) -> dict[int, str]:
        return rv.told(self._group)

    @cached_property
    def _place(self) -> torch.device:
        """Where the group moves tensors of the CPU: there or, if it has NCCL alone, on the GPU."""
        has_nccl_alone = dist.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if has_nccl_alone else CPU

    def move_many(
        self, sub_transfers: Mapping[str, SubTransfer], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        if len(sub_transfers) == 1:
            ((name, sub_transfer),) = sub_transfers.items()
            return {name: self.call(sub_transfer).move(tensors.get(name))}
        result: dict[str, Tensor | None] = self._many(sub_transfers, tensors, async_op=False)
        return result

    def start_many(
        self, sub_transfers: Mapping[str, SubTransfer], tensors: Mapping[str, Tensor]
    ) -> ManyHandle:
        handle: ManyHandle = self._many(sub_transfers, tensors, async_op=True)
        return handle

    def _many(
        self,
        sub_transfers: Mapping[str, SubTransfer],
        tensors: Mapping[str, Tensor],
        *,
        async_op: bool,
    ) -> Any:
        return rv.redistribute_many(
            tensors,
            {name: sub_transfer.layouts[0] for name, sub_transfer in sub_transfers.items()},
            {name: sub_transfer.layouts[1] for name, sub_transfer in sub_transfers.items()},
            async_op=async_op,
            group=self._group,
            topology=self._topology,
        )

    def call(self, sub_transfer: SubTransfer) -> DistCall:
        # Sub-transfers with the same transition share its compiled form, whatever region they move.
        key = SubTransfer("", sub_transfer.src, sub_transfer.dst, sub_transfer.dtype)
        if key not in self._calls:
            plan = rv.plan(*sub_transfer.layouts, sub_transfer.dtype, self._topology, trees=False)
            self._calls[key] = DistCall(plan, self._group)
        return self._calls[key]

    def fail(self, error: BaseException) -> None:
        rv.abort(error, self._group)

    def restart(self, text: str) -> list[str]:
        known = {
            sha256(str(sub_transfer).encode()).hexdigest()[:16]: sub_transfer
            for sub_transfer in self._calls
        }
        said = rv.restart(self._group, text=json.dumps([text, [*known]]))
        texts, names = zip(*map(json.loads, said), strict=True)
        of_ranks = [set(each) for each in names]
        for call in self._calls.values():
            call.disconnect()
        # In one order on all ranks, as at first: in a step some ranks use sub-transfers in another
        # order than others. A rank that failed early may not know a sub-transfer yet; its first use
        # connects it.
        for name, sub_transfer in sorted(known.items()):
            if all(name in of_ranks[rank] for rank in sub_transfer.ranks):
                self._calls[sub_transfer].connect()
        return list(texts)


class DistCall:
    """A transition compiled for one rank.

    Law (tests/dist/test_superscaler.py): ``start`` returns the same with and without ``expect``.

    Args:
        plan: the transition.
        group: process group; the default group if None.
    """

    def __init__(self, plan: rv.Plan, group: Any) -> None:
        self._plan, self._group = plan, group
        self._expected: deque[rv.Pending] = deque()
        self._connected: rv.Redistributor | None = None
        self.connect()

    @property
    def redistributor(self) -> rv.Redistributor:
        """The transition on connections that work; collective when first read after a restart."""
        return self._connected or self.connect()

    def connect(self) -> rv.Redistributor:
        """Make the connections; collective over the ranks of the transition."""
        self._connected = rv.Redistributor(self._plan, self._group)
        self._connected.prepare_post()
        return self._connected

    def disconnect(self) -> None:
        """Drop connections that are broken."""
        self._connected = None
        self._expected.clear()

    def move(self, tensor: Tensor | None) -> Tensor | None:
        result: Tensor | None = self.redistributor(tensor, requires_grad=False)
        return result

    def start(self, tensor: Tensor | None) -> Handle:
        if self._expected:
            return self._expected.popleft()
        handle: Handle = self.redistributor(tensor, requires_grad=False, async_op=True)
        return handle

    def expect(self) -> None:
        # Background calls that are not posted run in one order, the same on all ranks, so they
        # cannot start early on some ranks.
        if self.redistributor.is_posted and not self.redistributor.is_in_src:
            early = self.redistributor(None, requires_grad=False, async_op=True)
            self._expected.append(early)

    def forget(self) -> None:
        while self._expected:
            self._expected.popleft().forget()


@dataclass
class _Meeting:
    """One move: the values that ranks have contributed, and the results that they take."""

    shards: dict[int, Any] = field(default_factory=dict)
    num_present: int = 0
    result: rv.SimulationResult | None = None


class Board:
    """The shared state through which the ranks of a ``ThreadTransport`` communicate."""

    def __init__(self, timeout_secs: float = 60.0, num_ranks: int = 1) -> None:
        self.timeout_secs, self.num_ranks = timeout_secs, num_ranks
        self.restarted = threading.Barrier(num_ranks, self.forget, timeout_secs)
        self.texts: dict[int, str] = {}
        self.told: dict[int, str] = {}
        self.changed = threading.Condition()
        self.meetings: dict[tuple[SubTransfer, int], _Meeting] = defaultdict(_Meeting)
        self.rows: dict[tuple[tuple[int, ...], int], dict[int, list[Any]]] = defaultdict(dict)
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Wake all ranks that wait for a rank that failed."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def forget(self) -> None:
        """Drop the failure, and all moves that ranks had begun."""
        self.meetings.clear()
        self.rows.clear()
        self.error = None


class ThreadTransport:
    """Moves tensors with ``rvdcomm.simulate``: ranks are threads of one process; bytes are counted.

    For tests, and to try a plan without a cluster. Results are those of the same rvdcomm plans.
    """

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self._board = rank, board
        self._counts: dict[SubTransfer, int] = defaultdict(int)
        self._num_rows: dict[tuple[int, ...], int] = defaultdict(int)
        self.sent_bytes = 0

    def fail(self, error: BaseException) -> None:
        self._board.fail(error)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return tuple(range(self._board.num_ranks))

    def tell(self, text: str) -> None:
        self._board.told[self.rank] = text

    def told(self) -> dict[int, str]:
        return self._board.told.copy()

    def restart(self, text: str) -> list[str]:
        board = self._board
        board.texts[self.rank] = text
        board.restarted.wait()
        self._counts.clear()
        self._num_rows.clear()
        return [text for _, text in sorted(board.texts.items())]

    def rows(self, row: Tensor, ranks: tuple[int, ...]) -> Tensor:
        board, number = self._board, self._num_rows[ranks]
        self._num_rows[ranks] += 1
        with board.changed:
            found = board.rows[ranks, number]
            # As numbers: a tensor would be alive during the next step.
            found[self.rank] = row.tolist()
            # All ranks have posted the rows before these, so all have taken those before them.
            board.rows.pop((ranks, number - 2), None)
            board.changed.notify_all()
            board.changed.wait_for(
                lambda: len(found) == len(ranks) or board.error is not None, board.timeout_secs
            )
        if len(found) < len(ranks):
            raise TimeoutError(
                f"rank {self.rank} waits to agree with ranks {ranks}: {len(found)} of {len(ranks)} "
                f"came ({board.error or 'the others are late'})."
            )
        return torch.tensor([found[rank] for rank in ranks], dtype=row.dtype)

    def call(self, sub_transfer: SubTransfer) -> ThreadCall:
        return ThreadCall(self, sub_transfer)

    def start(self, sub_transfer: SubTransfer, tensor: Tensor | None) -> Handle:
        key = sub_transfer, self._counts[sub_transfer]
        self._counts[sub_transfer] += 1
        board = self._board
        with board.changed:
            meeting = board.meetings[key]
            if tensor is not None:
                meeting.shards[self.rank] = (
                    tensor.detach().to(_numpy_dtype(sub_transfer)).numpy().copy()
                )
            meeting.num_present += 1
            if meeting.num_present == len(sub_transfer.ranks):
                self._meet(sub_transfer, meeting)
                board.changed.notify_all()
        return _Visit(self, sub_transfer, key)

    def move_many(
        self, sub_transfers: Mapping[str, SubTransfer], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        return self.start_many(sub_transfers, tensors).wait()

    def start_many(
        self, sub_transfers: Mapping[str, SubTransfer], tensors: Mapping[str, Tensor]
    ) -> ManyHandle:
        return _Visits(
            {
                name: self.start(sub_transfer, tensors.get(name))
                for name, sub_transfer in sub_transfers.items()
            }
        )

    def _meet(self, sub_transfer: SubTransfer, meeting: _Meeting) -> None:
        try:
            dtype = str(_numpy_dtype(sub_transfer)).removeprefix("torch.")
            meeting.result = rv.simulate(
                rv.plan(*sub_transfer.layouts, dtype, trees=False), meeting.shards
            )
        except BaseException as error:
            self._board.fail(error)
            raise

    def take(self, sub_transfer: SubTransfer, key: tuple[SubTransfer, int]) -> Tensor | None:
        """Wait for all ranks of a move, and return this rank's shard."""
        board = self._board
        with board.changed:
            meeting = board.meetings[key]
            board.changed.wait_for(
                lambda: meeting.result is not None or board.error is not None, board.timeout_secs
            )
            if meeting.result is None:
                raise TimeoutError(
                    f"rank {self.rank} waits for {sub_transfer.src} -> {sub_transfer.dst}: "
                    f"{meeting.num_present} of {len(sub_transfer.ranks)} ranks came ("
                    f"{board.error or 'the others are late'})."
                )
            sent = meeting.result.sent_bytes.get(self.rank, 0)
            self.sent_bytes += (
                sent * _dtype(sub_transfer).itemsize // _numpy_dtype(sub_transfer).itemsize
            )
            shard = meeting.result.shards.get(self.rank)
            meeting.num_present -= 1
            if meeting.num_present == 0:
                del board.meetings[key]
        return None if shard is None else torch.from_numpy(shard.copy()).to(_dtype(sub_transfer))


def _dtype(sub_transfer: SubTransfer) -> torch.dtype:
    found: torch.dtype = getattr(torch, sub_transfer.dtype)
    return found


def _numpy_dtype(sub_transfer: SubTransfer) -> torch.dtype:
    """The dtype in which threads move: numpy has no bfloat16, so its sums are in float32 here."""
    return torch.float32 if sub_transfer.dtype == "bfloat16" else _dtype(sub_transfer)


@dataclass(frozen=True)
class ThreadCall:
    """A sub-transfer on a ``ThreadTransport``."""

    transport: ThreadTransport
    sub_transfer: SubTransfer

    def move(self, tensor: Tensor | None) -> Tensor | None:
        return self.start(tensor).wait()

    def start(self, tensor: Tensor | None) -> Handle:
        return self.transport.start(self.sub_transfer, tensor)

    def expect(self) -> None:
        """Nothing to do: threads leave their values on the board at once."""

    def forget(self) -> None:
        """Nothing to do: ``expect`` posts nothing."""


@dataclass(frozen=True)
class _Visit:
    """A move that was started on a ``ThreadTransport``."""

    transport: ThreadTransport
    sub_transfer: SubTransfer
    key: tuple[SubTransfer, int]

    def wait(self) -> Tensor | None:
        """This rank's shard at the dst end."""
        return self.transport.take(self.sub_transfer, self.key)


@dataclass(frozen=True)
class _Visits:
    """Moves that were started together on a ``ThreadTransport``."""

    visits: Mapping[str, Handle]

    def wait(self) -> dict[str, Tensor | None]:
        return {name: visit.wait() for name, visit in self.visits.items()}
