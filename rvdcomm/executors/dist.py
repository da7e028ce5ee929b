"""Dist: run one rank's part of a program on torch.distributed, whichever backend serves it.

The collectives move bytes, so that every dtype torch can hold is moved exactly; sums are done here,
in ascending order of parts, or by the backend's all_reduce where lowering allowed it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rvdcomm.box import Box
from rvdcomm.errors import CommError
from rvdcomm.executors.world import Subgroup, World
from rvdcomm.layout import ranges_text
from rvdcomm.program import DST, NO_BUFFER, SRC, Collective, Copy, Program, Zero

_ADD_AS = {
    # Two's complement: the sum of the bits is the same, signed or not.
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_ADD_IN = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}


def add_into(dst: Tensor, src: Tensor) -> None:
    """``dst += src`` for every dtype that has a sum, also where torch has no kernel for it."""
    if dst.dtype in _ADD_AS:
        dst.view(_ADD_AS[dst.dtype]).add_(src.view(_ADD_AS[src.dtype]))
    elif dst.dtype in _ADD_IN:
        wide = _ADD_IN[dst.dtype]
        dst.copy_(dst.to(wide) + src.to(wide))
    else:
        dst.add_(src)


@dataclass
class _Run:
    """One call: its buffers as flat tensors, and the caller's src tensor, which may be strided."""

    flat: dict[str, Tensor]
    src: Tensor | None
    dtype: torch.dtype
    device: torch.device
    sent_bytes: int = 0


_Operation = Callable[[_Run], None]


class DistProgram:
    """A program compiled for this rank: every view and split is worked out beforehand.

    Making it is collective over the ranks of every subgroup that it uses; so is ``run``.
    ``sent_bytes`` counts what the last run handed to the backend for other ranks.
    """

    def __init__(self, program: Program, world: World) -> None:
        self.program, self.world, self.rank = program, world, world.rank
        self.sent_bytes = 0
        compilers = {Copy: self._copy, Zero: self._zero, Collective: self._collective}
        self._operations: list[_Operation] = [
            compilers[type(instruction)](instruction)  # type: ignore[operator]
            for instruction in program.of_rank(self.rank)
        ]
        arena = program.arena(self.rank)
        self._arena_bytes = arena.num_bytes
        item = program.item_bytes
        self._staging = [
            (name, offset // item, program.buffer[name, self.rank].num_elements)
            for name, offset in arena.offsets.items()
        ]

    def run(self, src: Tensor | None, dst: Tensor | None, dtype: torch.dtype, device: Any) -> None:
        """Read ``src`` and write ``dst``; each is None for a rank outside that layout."""
        run = _Run({}, src, dtype, device)
        if dst is not None:
            run.flat[DST] = dst.view(-1)
        if self._staging:
            arena = self.world.arena(self._arena_bytes, device).view(dtype)
            for name, start, count in self._staging:
                run.flat[name] = arena.narrow(0, start, count)
        for operation in self._operations:
            operation(run)
        self.sent_bytes = run.sent_bytes

    # --- buffers --------------------------------------------------------------------------------

    def _flat(self, name: str) -> Callable[[_Run], Tensor]:
        """Get a buffer as a flat tensor; a strided src is made contiguous if a call needs that."""

        def get(run: _Run) -> Tensor:
            if name == SRC and name not in run.flat:
                assert run.src is not None
                run.flat[name] = run.src.contiguous().view(-1)
            return run.flat[name]

        return get

    def _view(self, name: str, piece: int, box: Box) -> Callable[[_Run], Tensor]:
        """A strided view of ``box`` in a piece of a buffer."""
        buffer = self.program.buffer[name, self.rank]
        outer = buffer.pieces[piece]
        if name == SRC:
            # The caller's tensor may be strided: it is sliced, never made contiguous for a copy.
            slices = box.slices_within(outer)
            return lambda run: run.src[slices]  # type: ignore[index]
        stride = [prod(outer.shape[d + 1 :]) for d in range(len(outer.shape))]
        starts = (s.start * step for s, step in zip(box.slices_within(outer), stride, strict=True))
        offset = buffer.offset(piece) + sum(starts)
        flat, shape = self._flat(name), box.shape

        def get(run: _Run) -> Tensor:
            buffer = flat(run)
            # as_strided counts from the start of the storage, which the arena shares.
            return buffer.as_strided(shape, stride, buffer.storage_offset() + offset)

        return get

    def _run_of(self, name: str, entries: list[Any], side: str) -> Callable[[_Run], Tensor]:
        """The contiguous run that holds these entries, as bytes."""
        if name == NO_BUFFER or not entries:
            return lambda run: torch.empty(0, dtype=torch.uint8, device=run.device)
        buffer = self.program.buffer[name, self.rank]
        first, piece = entries[0].box, getattr(entries[0], side)
        inner = first.flat_offset_within(buffer.pieces[piece])
        assert inner is not None, "verify() proves that entries are contiguous"
        start = buffer.offset(piece) + inner
        count = sum(entry.box.num_elements for entry in entries)
        flat = self._flat(name)
        return lambda run: flat(run).narrow(0, start, count).view(torch.uint8)

    # --- instructions ---------------------------------------------------------------------------

    def _copy(self, copy: Copy) -> _Operation:
        pairs = [
            (self._view(copy.dst, e.dst_piece, e.box), self._view(copy.src, e.src_piece, e.box))
            for e in copy.entries
        ]
        is_copy = copy.op == "copy"

        def operation(run: _Run) -> None:
            for dst, src in pairs:
                if is_copy:
                    dst(run).copy_(src(run))
                else:
                    add_into(dst(run), src(run))

        return operation

    def _zero(self, zero: Zero) -> _Operation:
        views = [self._view(zero.dst, e.dst_piece, e.box) for e in zero.entries]

        def operation(run: _Run) -> None:
            for view in views:
                view(run).zero_()

        return operation

    def _collective(self, collective: Collective) -> _Operation:
        group = self.world.subgroup(collective.ranks)
        i = collective.ranks.index(self.rank)
        src_name, dst_name = collective.src[i], collective.dst[i]
        if collective.kind == "all_reduce":
            call = self._all_reduce(collective, dst_name, group)
        elif collective.kind == "all_gather":
            call = self._all_gather(collective, src_name, dst_name, group)
        else:
            call = self._all_to_all(collective, src_name, dst_name, group)
        ranks = ranges_text(collective.ranks)
        what = f"{self.world.backend} {collective.kind} on group ({ranks})"

        def operation(run: _Run) -> None:
            try:
                call(run)
            except RuntimeError as error:
                raise CommError(f"{what}, rank {self.rank}: {error}") from None

        return operation

    def _entries(self, collective: Collective, rank: int, peer: int) -> list[Any]:
        message = collective.by_pair.get((rank, peer))
        return [] if message is None else list(message.entries)

    def _all_to_all(
        self, collective: Collective, src: str, dst: str, group: Subgroup
    ) -> _Operation:
        sent = [self._entries(collective, self.rank, peer) for peer in collective.ranks]
        received = [self._entries(collective, peer, self.rank) for peer in collective.ranks]
        src_run = self._run_of(src, [e for entries in sent for e in entries], "src_piece")
        dst_run = self._run_of(dst, [e for entries in received for e in entries], "dst_piece")
        item = self.program.item_bytes
        src_splits = [item * sum(e.box.num_elements for e in entries) for entries in sent]
        dst_splits = [item * sum(e.box.num_elements for e in entries) for entries in received]
        own = src_splits[collective.ranks.index(self.rank)]

        def operation(run: _Run) -> None:
            tensor = src_run(run)
            group.all_to_all(dst_run(run), tensor, dst_splits, src_splits)
            run.sent_bytes += tensor.numel() - own

        return operation

    def _all_gather(
        self, collective: Collective, src: str, dst: str, group: Subgroup
    ) -> _Operation:
        sent = self._entries(collective, self.rank, collective.ranks[0])
        received = [e for p in collective.ranks for e in self._entries(collective, p, self.rank)]
        src_run = self._run_of(src, sent, "src_piece")
        dst_run = self._run_of(dst, received, "dst_piece")
        num_others = len(collective.ranks) - 1

        def operation(run: _Run) -> None:
            tensor = src_run(run)
            group.all_gather(dst_run(run), tensor)
            run.sent_bytes += tensor.numel() * num_others

        return operation

    def _all_reduce(self, collective: Collective, dst: str, group: Subgroup) -> _Operation:
        entries = self._entries(collective, self.rank, self.rank)
        dst_run = self._run_of(dst, entries, "dst_piece")
        sent = sum(n for (a, _), n in collective.traffic().items() if a == self.rank)

        def operation(run: _Run) -> None:
            tensor = dst_run(run).view(run.dtype)
            group.all_reduce(tensor)
            run.sent_bytes += sent * tensor.element_size()

        return operation
