"""Traffic: what some ranks move in one exchange of a path, and in which groups they call.

Everything here is known to a rank alone. So the ranks of a group, each of which lowers its own
part of a program, agree about the group and the kind of its call without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rvdcomm.layout import Layout, Topology, View
from rvdcomm.planning.cells import Cells, CommonBlocks
from rvdcomm.planning.exchange import Exchange, Move
from rvdcomm.planning.path import State, Step

Islands = tuple[tuple[int, ...], ...]
"""Disjoint groups of ranks that can map each other's memory."""

MAX_SEARCHED_RANKS = 64
"""In a larger group, who is joined with whom is not searched for: all of it makes one call."""

CONNECTED = frozenset({"all_gather", "all_to_all", "reduce_scatter", "all_reduce"})
"""Kinds of steps in whose product groups every rank sends to every other."""


@dataclass
class Leg:
    """One exchange of a step: the state that it makes, and what moves there.

    ``index`` is that of the step in its path, ``number`` that of the exchange in its step. What
    ranks move, and their groups, are computed once: all slices of the tensor ask for them.
    """

    index: int
    number: int
    step: Step
    topology: Topology
    islands: Islands
    view: View
    _exchanges: dict[int, Exchange] = field(default_factory=dict)
    _moves: dict[tuple[int, ...], tuple[Move, ...]] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """What the exchange makes."""
        return self.step.legs[self.number][1]

    @cached_property
    def home(self) -> dict[int, int]:
        """The island of every rank that is in one."""
        return {rank: i for i, island in enumerate(self.islands) for rank in island}

    def target(self, rank: int) -> Cells:
        """The cells of the state that the exchange makes."""
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
        """Those of ``ranks`` that hold something before or after the step."""
        return [rank for rank in ranks if rank in self.step]

    def moves(self, ranks: Iterable[int]) -> tuple[Move, ...]:
        """What ``ranks`` take and give, sorted."""
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

    def _partners(self, rank: int) -> Iterator[int]:
        """Ranks that ``rank`` sends to, or receives from."""
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
        """Ranks that messages join with ``rank``, directly or not."""
        whole = self.step.group(rank)
        if not self.step.direct and self.step.kind in CONNECTED:
            island = self.home.get(rank)
            is_near = island is not None and all(self.home.get(r) == island for r in whole)
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
        exchange = self.exchange(rank)
        own = exchange.src if rank in exchange.src else exchange.dst
        found = {rank}
        for box in own.boxes(own.key(rank)):
            block = CommonBlocks(exchange.src.cuts, exchange.dst.cuts).around(box)
            for side in (exchange.src, exchange.dst):
                named = (key for key in side.meeting(block) if side.boxes(key))
                found.update(side.holders(key, 0)[0] for key in named)
        return tuple(sorted(found))

    # --- kinds ----------------------------------------------------------------------------------

    def is_gather(self, group: Sequence[int], received: Mapping[int, Sequence[Move]]) -> bool:
        """Whether the call is an all_gather: all ranks send as much, and the same to all.

        Args:
            group: the ranks of the call.
            received: what one of them takes from every rank of the group.
        """
        if len(received) < len(group):
            return False
        if len({self.home.get(member, -1 - member) for member in group}) < len(group):
            return False
        sizes = {sum(move.box.num_elements for move in moves) for moves in received.values()}
        return len(sizes) == 1 and self._gathers(group)

    def _gathers(self, group: Sequence[int]) -> bool:
        """Whether every rank of the group is to hold all that the group holds, once."""
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
