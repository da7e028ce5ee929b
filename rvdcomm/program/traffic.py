"""Traffic: the moves of some ranks in one exchange of a path, and the groups of their calls.

Every rank computes this alone, from the layouts. So the ranks of a group, each of which lowers its
own part of a program, agree about the group and the kind of its call without a message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rvdcomm.layout import Box, Layout, View
from rvdcomm.network import Topology
from rvdcomm.planning.cells import Cells
from rvdcomm.planning.exchange import Exchange, Move
from rvdcomm.planning.path import State, Step
from rvdcomm.program.domains import SharedDomains

MAX_SEARCHED_RANKS = 64
"""In a larger group, connected components are not searched: the whole group makes one call."""

CONNECTED = frozenset({"all_gather", "all_to_all", "reduce_scatter", "all_reduce"})
"""Kinds of steps in whose product groups every rank sends to every other."""


@dataclass
class StepExchange:
    """One exchange of a step: the state after it, and its moves.

    ``index`` is the index of the step in its path, ``number`` the index of the exchange in its
    step. Moves and groups are computed once, since all slices of the tensor need them.
    """

    index: int
    number: int
    step: Step
    topology: Topology
    domains: SharedDomains
    view: View
    _exchanges: dict[int, Exchange] = field(default_factory=dict)
    _moves: dict[tuple[int, ...], tuple[Move, ...]] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """The state after the exchange."""
        return self.step.step_exchanges[self.number][1]

    @cached_property
    def home(self) -> dict[int, int]:
        """The number of the domain of every rank that is in one."""
        return {rank: i for i, domain in enumerate(self.domains) for rank in domain}

    def target(self, rank: int) -> Cells:
        """The cells of the state after the exchange, in the group of ``rank``."""
        return self.exchange(rank).dst

    def exchange(self, rank: int) -> Exchange:
        """The exchange in the group of ``rank``."""
        if rank not in self._exchanges:
            group = self.step.group(rank)
            found = self.step.exchange(self.number, rank, self.topology, self.view)
            self._exchanges.update(dict.fromkeys(group, found))
        return self._exchanges[rank]

    # --- moves ----------------------------------------------------------------------------------

    def taking_part(self, ranks: Iterable[int]) -> list[int]:
        """The members of ``ranks`` that hold something before or after the step."""
        return [rank for rank in ranks if rank in self.step]

    def moves(self, ranks: Iterable[int]) -> tuple[Move, ...]:
        """The moves into and out of ``ranks``, sorted."""
        asked = tuple(ranks)
        if asked not in self._moves:
            inside = set(asked)
            found: list[Move] = []
            for rank in asked:
                exchange = self.exchange(rank)
                found += exchange.into(rank)
                found += [m for m in exchange.out_of(rank) if m.dst_rank not in inside]
            self._moves[asked] = tuple(sorted(found))
        return self._moves[asked]

    def is_near(self, move: Move) -> bool:
        """Whether the move is a read from another rank's memory."""
        a, b = move.src_rank, move.dst_rank
        return a != b and a in self.home and self.home[a] == self.home.get(b)

    def shares_memory(self, group: Sequence[int]) -> bool:
        """Whether some ranks of the group read each other's memory."""
        return len({self.home.get(rank, -1 - rank) for rank in group}) < len(group)

    def _partners(self, rank: int) -> Iterator[int]:
        """Ranks to which ``rank`` sends messages, or from which it receives messages."""
        exchange = self.exchange(rank)
        for move in (*exchange.into(rank), *exchange.out_of(rank)):
            if not self.is_near(move) and move.src_rank != move.dst_rank:
                yield move.src_rank if move.dst_rank == rank else move.dst_rank

    # --- groups ---------------------------------------------------------------------------------

    def groups(self, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The groups in which ``ranks`` call the backend, ascending; each of two ranks or more."""
        asked = tuple(ranks)
        if asked not in self._groups:
            found: list[tuple[int, ...]] = []
            done: set[int] = set()
            for rank in asked:
                if rank not in done:
                    found.append(self._group(rank))
                    done.update(found[-1])
            self._groups[asked] = tuple(sorted(group for group in found if len(group) > 1))
        return self._groups[asked]

    def _group(self, rank: int) -> tuple[int, ...]:
        """The ranks that messages connect with ``rank``, directly or through others."""
        whole = self.step.group(rank)
        if not self.step.direct and self.step.kind in CONNECTED:
            domain = self.home.get(rank)
            is_near = domain is not None and all(self.home.get(r) == domain for r in whole)
            return (rank,) if is_near else whole
        block = self._block(rank)
        if block is not None:
            return block
        if len(whole) > MAX_SEARCHED_RANKS:
            return whole
        found, todo = {rank}, [rank]
        while todo and len(found) < len(whole):
            more = set(self._partners(todo.pop())) - found
            found |= more
            todo += more
        return tuple(sorted(found))

    def _block(self, rank: int) -> tuple[int, ...] | None:
        """The group of a transfer whose layouts have neither replicas nor parts.

        Cut points that both sides have divide the tensor in blocks. No box crosses them, and boxes
        of one block overlap in chains (docs/exchange.md), so the ranks of a block are the group.
        """
        src, dst = self.step.src.source, self.step.dst.source
        if self.step.kind != "transfer" or not (
            isinstance(src, Layout) and isinstance(dst, Layout)
        ):
            return None
        if src.rvd.r * src.rvd.v * dst.rvd.r * dst.rvd.v > 1:
            return None
        common = [sorted({*a} & {*b}) for a, b in zip(src.cuts, dst.cuts, strict=True)]
        exchange = self.exchange(rank)
        own = exchange.src if rank in exchange.src else exchange.dst
        found = {rank}
        for box in own.boxes(own.key(rank)):
            block = Box(
                tuple(
                    cut[bisect_right(cut, low) - 1] for cut, low in zip(common, box.lo, strict=True)
                ),
                tuple(
                    cut[bisect_left(cut, high)] for cut, high in zip(common, box.hi, strict=True)
                ),
            )
            for side in (exchange.src, exchange.dst):
                named = (key for key in side.meeting(block) if side.boxes(key))
                found.update(side.holders(key, 0)[0] for key in named)
        return tuple(sorted(found))

    # --- kinds ----------------------------------------------------------------------------------

    def is_gather(self, group: Sequence[int], received: Mapping[int, Sequence[Move]]) -> bool:
        """Whether the call is an all_gather: every rank sends the same data to all, in equal sizes.

        Args:
            group: the ranks of the call.
            received: the moves from every rank of the group to one rank of the group.
        """
        if len(received) < len(group):
            return False
        if self.shares_memory(group):
            return False
        sizes = {sum(move.box.num_elements for move in moves) for moves in received.values()}
        return len(sizes) == 1 and self._gathers(group)

    def _gathers(self, group: Sequence[int]) -> bool:
        """Whether every rank of the group receives the cells of all others, one copy of each."""
        exchange = self.exchange(group[0])
        src, dst = exchange.src, exchange.dst
        if self.step.direct:
            src_source, dst_source = self.step.src.source, self.step.dst.source
            if not (isinstance(src_source, Layout) and isinstance(dst_source, Layout)):
                return False
            counts = src_source.rvd
            return (
                (counts.r, counts.v) == (1, 1)
                and dst_source.rvd.r == len(dst_source.ranks)
                and set(src_source.ranks) == set(dst_source.ranks)
            )
        keys = {dst.key(member) for member in group}
        parts = {src.part(member) for member in group}
        cells = {src.key(member) for member in group}
        return len(keys) == len(parts) == 1 and len(cells) == len(group)
