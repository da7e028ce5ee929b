"""Path: a plan as steps and the states between them. People read it as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rvdcomm.cost import Traffic
from rvdcomm.layout import Holding, Holdings, Layout, View, ranges_text
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Binding, Source
from rvdcomm.planning.cells import Cells, Key
from rvdcomm.planning.digits import view_of
from rvdcomm.planning.exchange import Exchange, Move
from rvdcomm.planning.primitives import kind_of_rebind


@dataclass(frozen=True, eq=False)
class State:
    """A placement and its text: ``R(1)V(1)D(2,4)``, with ``*`` and ``F`` if strided.

    States are equal if their placements and texts are equal. Both are computed on first use: the
    search does not need them.
    """

    source: Source

    @cached_property
    def placement(self) -> Holdings:
        """Which ranks hold which boxes."""
        source = self.source
        if isinstance(source, Layout):
            return source.placement
        cells = Cells(source)
        members: dict[tuple[int, Key], list[int]] = {}
        for rank in source.ranks:
            members.setdefault((cells.part(rank), cells.key(rank)), []).append(rank)
        holdings = tuple(
            Holding(part, cells.boxes(key), tuple(sorted(ranks)))
            for (part, key), ranks in members.items()
        )
        return Holdings(source.shape, len(cells.parts), holdings)

    @cached_property
    def text(self) -> str:
        """Counts of replicas, parts and pieces."""
        return str(self.source.rvd if isinstance(self.source, Layout) else self.source)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold something, in the source's order."""
        return self.source.ranks

    def __contains__(self, rank: int) -> bool:
        return rank in self.source

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, State):
            return NotImplemented
        return self.text == other.text and self.placement == other.placement

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True)
class Step:
    """One primitive: inside every group, ``src`` becomes ``dst``.

    An all_reduce is a reduce_scatter to ``middle`` and an all_gather from ``middle``. A ``direct``
    step is an exchange among all ranks; other steps run in the product groups of the axes that they
    rebind. An exchange may run in ``num_slices`` windows one after another, which makes its staging
    buffers smaller.
    """

    kind: str
    src: State
    dst: State
    middle: State | None = None
    direct: bool = False
    num_slices: int = 1

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that communicate; each group ascending."""
        source = self.src.source
        if self.changed is None or not isinstance(source, Binding):
            return (tuple(sorted({*self.src.ranks, *self.dst.ranks})),)
        return source.grid.groups(self.changed)

    @property
    def step_exchanges(self) -> tuple[tuple[State, State], ...]:
        """The exchanges of this step, one after another."""
        if self.middle is None:
            return ((self.src, self.dst),)
        return ((self.src, self.middle), (self.middle, self.dst))

    def __contains__(self, rank: int) -> bool:
        return rank in self.src or rank in self.dst

    def group(self, rank: int) -> tuple[int, ...]:
        """The group in ``groups`` that ``rank`` is in."""
        src = self.src.source
        if self.changed is None or not isinstance(src, Binding):
            return self.groups[0]
        return src.grid.group(rank, self.changed)

    @cached_property
    def changed(self) -> frozenset[int] | None:
        """The axes that are rebound; None for a direct step."""
        src, dst = self.src.source, (self.middle or self.dst).source
        if self.direct or isinstance(src, Layout) or isinstance(dst, Layout):
            return None
        both = zip(src.targets, dst.targets, strict=True)
        return frozenset(a for a, (s, t) in enumerate(both) if s != t)

    def exchange(
        self, step_exchange: int, rank: int, topology: Topology, view: View | None = None
    ) -> Exchange:
        """The exchange of an exchange in the group of ``rank``, with boxes in ``view`` of the
        tensor.
        """
        src, dst = (
            Cells(state.source, rank, self.changed, view)
            for state in self.step_exchanges[step_exchange]
        )
        return Exchange(src, dst, topology)

    def moves(self, topology: Topology) -> list[tuple[Move, ...]]:
        """The moves of every exchange, of all ranks, sorted."""
        found = []
        for step_exchange in range(len(self.step_exchanges)):
            moves: list[Move] = []
            for group in self.groups:
                exchange = self.exchange(step_exchange, group[0], topology)
                moves += [move for rank in group for move in exchange.into(rank)]
            found.append(tuple(sorted(moves)))
        return found

    def traffic(self, topology: Topology, item_bytes: int) -> list[Traffic]:
        """The bytes from rank to rank, for every exchange."""
        found: list[Traffic] = []
        for moves in self.moves(topology):
            sent: Counter[tuple[int, int]] = Counter()
            for move in moves:
                sent[move.src_rank, move.dst_rank] += move.box.num_elements * item_bytes
            found.append(sent)
        return found


@dataclass(frozen=True)
class Path:
    """Steps from ``src`` to ``dst``; prints as a table.

    Invariant: the ``src`` of a step is the ``dst`` of the step before, as a placement.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(sorted({*self.src.ranks, *self.dst.ranks}))

    @cached_property
    def view(self) -> View:
        """The view of the tensor for the boxes of programs: where possible, a cell is one box."""
        states = {
            id(s): s
            for step in self.steps
            for step_exchange in step.step_exchanges
            for s in step_exchange
        }
        return view_of([self.src, *(state.source for state in states.values()), self.dst])

    def table(self, notes: Iterable[str] | None = None) -> list[str]:
        """Lines of a table; ``notes`` adds a column, one note per step."""
        rows = [("step", "primitive", "groups", "layout")]
        rows.append(("", "", "", _on_ranks(str(self.src.rvd), self.src.ranks)))
        for i, step in enumerate(self.steps):
            text = _on_ranks(step.dst.text, step.dst.ranks)
            name = f"{step.kind} /{step.num_slices}" if step.num_slices > 1 else step.kind
            rows.append((str(i), name, groups_text(step.groups), text))
        columns = [*zip(*rows, strict=True)]
        if notes is not None:
            columns.append(("cost", "", *notes))
        widths = [max(map(len, column)) for column in columns]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]

    def __str__(self) -> str:
        return "\n".join(self.table())


def steps_of_bindings(bindings: list[Binding]) -> list[Step]:
    """One step per pair of neighbours; a reduce_scatter and its all_gather become an all_reduce."""
    steps: list[Step] = []
    for (before, after), (src, dst) in zip(
        pairwise(bindings), pairwise(map(State, bindings)), strict=True
    ):
        kind = kind_of_rebind(before.targets, after.targets)
        # V to R in one step: all ranks send everything they have to all others.
        step = Step("exchange" if kind == "all_reduce" else kind, src, dst)
        last = steps[-1] if steps else step
        is_pair = (last.kind, kind) == ("reduce_scatter", "all_gather")
        if is_pair and last.changed == step.changed:
            # The same ranks sum the pieces and gather them again: that is an all_reduce.
            steps[-1] = Step("all_reduce", last.src, dst, middle=last.dst)
        else:
            steps.append(step)
    return steps


def exchange_step(src: State, dst: State, num_slices: int = 1) -> Step:
    """The step from any state to any other; a ``transfer`` where no rank is on both sides."""
    kind = "transfer" if set(src.ranks).isdisjoint(dst.ranks) else "exchange"
    return Step(kind, src, dst, direct=True, num_slices=num_slices)


MAX_RUNS = 16
"""A table writes out at most this many runs of ranks."""


def groups_text(groups: Sequence[Sequence[int]]) -> str:
    """A short text for groups: ``4x(0,2)`` means 4 groups, of which the first is ranks 0 and 2.

    >>> groups_text(((0, 2), (1, 3)))
    '2x(0,2)'
    >>> groups_text((range(0, 800, 8),))
    '(0:800:8)'
    """
    first = _short_ranges(groups[0])
    return f"({first})" if len(groups) == 1 else f"{len(groups)}x({first})"


def _short_ranges(ranks: Sequence[int]) -> str:
    """As ``ranges_text``; many runs are ``start:stop:stride`` if possible, or else cut short."""
    runs = ranges_text(ranks).split(",")
    if len(runs) <= MAX_RUNS:
        return ",".join(runs)
    stride = ranks[1] - ranks[0]
    if stride > 0 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}:{ranks[-1] + stride}:{stride}"
    return f"{','.join(runs[:MAX_RUNS])},..."


def _on_ranks(text: str, ranks: tuple[int, ...]) -> str:
    return f"{text} on {ranges_text(sorted(ranks))}"
