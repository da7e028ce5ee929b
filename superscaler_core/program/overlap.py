"""Overlap: a rewrite of a step program so that communication runs while devices compute.

A communication is replaced by its start, as early as what it reads allows, and its wait, as late as
the readers of what it writes allow. All devices keep one order, so that no device waits for a later
instruction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter

from superscaler_core.plan.overlap import Overlap
from superscaler_core.program.event import actions_in
from superscaler_core.program.freed import freed_block
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.uses import Uses
from superscaler_core.program.verb import COMPUTING, MOVES, Phase, Verb
from superscaler_core.schedules import Action, ActionKind


@dataclass(frozen=True, slots=True)
class OverlapReach:
    """How far the start and the wait of a communication may be from its place.

    Distances are counted among communications of one kind and of the same devices.

    Attributes:
        ahead: it may start when the communication this many before it has ended; 0 in its place.
        under_way: how many may be under way when it ends; 0 if it ends in its place.
        ahead_bytes: the most bytes that those which have started ahead bring; None for any.
    """

    ahead: int = 0
    under_way: int = 0
    ahead_bytes: int | None = None


ANY = 1 << 30
"""A distance that no block has: only values bound a communication."""

OF_MOVES: Mapping[Verb, OverlapReach] = dict.fromkeys(MOVES, OverlapReach(ahead=ANY))


def reach_of(overlap: Overlap) -> Mapping[Verb, OverlapReach]:
    """How far a plan lets communication of weights, and copies to the host, start and end."""
    reach = {
        Verb.RELOAD: OverlapReach(ahead=overlap.copied_ahead),
        Verb.OFFLOAD: OverlapReach(under_way=1),
    }
    if overlap.prefetch:
        early = OverlapReach(ahead=overlap.prefetch, ahead_bytes=overlap.memory_bytes)
        reach |= dict.fromkeys((Verb.FETCH, Verb.UNSHARD), early)
    if overlap.reductions:
        reach[Verb.REDUCE] = OverlapReach(under_way=overlap.most_reductions)
    return reach


Size = Callable[[StepInstruction], int]
"""The bytes that a communication of weights brings to a device, at most."""


def overlapped(
    program: StepProgram, reach: Mapping[Verb, OverlapReach], bytes_of: Size = lambda _: 0
) -> StepProgram:
    """Start communication earlier, and wait for it later, while devices compute.

    Weights that are fetched before all stages are waited for in the first run that reads them.
    Gradients that are reduced after all stages start in the last run that adds to them. Both stay
    where they are if not all of their devices take part in this run.

    Laws (tests/superscaler_core/program/test_overlap.py): each device runs the same instructions,
    up to the positions of starts and waits; a program that was rewritten stays as it is.

    Args:
        program: any program. Stages that run in pairs stay as they are.
        reach: the kinds of communication to split, and how far.
        bytes_of: sizes, for ``OverlapReach.ahead_bytes``.
    """
    program = _settled(program, reach)
    begin, blocks, end = [*program.begin], dict(program.blocks), list[StepInstruction]()
    for key in _free_keys(program):
        before, *rows, after = _Spread(blocks[key], reach, bytes_of).rows()
        begin += before
        end += after
        blocks[key] = freed_block(tuple(chain.from_iterable(rows)))
    return replace(program, begin=tuple(begin), blocks=blocks, end=(*end, *program.end))


BlockKey = tuple[int, ActionKind]


def _free_keys(program: StepProgram) -> list[BlockKey]:
    """The blocks that may change."""
    # A pair contains the instructions of its stages' blocks. An update fetches what it has made.
    paired = {key for pair in program.pairs for key in pair}
    return [k for k in program.blocks if k not in paired and k[1] is not ActionKind.UPDATE]


# --- communication of the step ------------------------------------------------------------------


def _settled(program: StepProgram, reach: Mapping[Verb, OverlapReach]) -> StepProgram:
    """A program whose communication before and after all stages is in the run that it is for."""
    spots, outside = _Spots(program), []
    more: dict[BlockKey, list[tuple[int, StepInstruction]]] = {}
    for block, is_end in ((program.begin, False), (program.end, True)):
        left = []
        for given in block:
            is_split = given.kind in reach and given.phase is Phase.WHOLE
            spot = spots.of(given, is_end=is_end) if is_split else None
            if spot is None:
                left.append(given)
            else:
                key, place, run = spot
                more.setdefault(key, []).append((place, replace(given, microbatch=run.microbatch)))
        outside.append(tuple(left))
    blocks = dict(program.blocks)
    for key, mine in more.items():
        placed = [*mine, *enumerate(blocks[key])]
        blocks[key] = tuple(i for _, i in sorted(placed, key=itemgetter(0)))
    begin, end = outside
    return replace(program, begin=begin, blocks=blocks, end=end)


class _Spots:
    """Where the blocks of a program first read weights of the step, and last add to gradients."""

    def __init__(self, program: StepProgram) -> None:
        runs = [*enumerate(run for event in program.events for run in actions_in(event))]
        self._last = {(run.stage, run.kind): (number, run) for number, run in runs}
        self._first = {(run.stage, run.kind): (number, run) for number, run in reversed(runs)}
        self._blocks, self._free = program.blocks, frozenset(_free_keys(program))

    @cached_property
    def _uses(self) -> Mapping[BlockKey, Uses]:
        return {key: Uses(block) for key, block in self._blocks.items()}

    def of(self, given: StepInstruction, *, is_end: bool) -> tuple[BlockKey, int, Action] | None:
        """The block and the position of communication of the step, and the run that it is for."""
        found = [
            (number, place + is_end, key, run)
            for key, (number, run) in (self._last if is_end else self._first).items()
            for place in (self._uses[key].writers if is_end else self._uses[key].readers)(given)
        ]
        if not found:
            return None
        _, place, key, run = max(found) if is_end else min(found)
        is_alone = self._uses[key].devices.issuperset(given.devices)
        return (key, place, run) if is_alone and key in self._free else None


# --- communication of a run ---------------------------------------------------------------------


class _Spread:
    """Where the communication of a block starts and ends.

    Positions are those of the instructions before which it does; -1 is before all stages, and one
    behind the end of the block is after them.
    """

    def __init__(self, block: Block, reach: Mapping[Verb, OverlapReach], bytes_of: Size) -> None:
        self._block, self._uses, self._bytes_of = block, Uses(block), bytes_of
        self._starts: dict[int, int] = {}
        self._waits: dict[int, int] = {}
        # A wait comes before the starts of what reads its value.
        for lane in _lanes(block, reach, Phase.WAIT):
            self._start(lane, reach[block[lane[0]].kind])
        for lane in _lanes(block, reach, Phase.START):
            self._wait(lane, reach[block[lane[0]].kind])

    def _start(self, lane: Sequence[int], reach: OverlapReach) -> None:
        begun = 0
        for number, place in enumerate(lane):
            if self._block[place].phase is not Phase.WHOLE:
                continue
            count = self._num_ahead(lane, number, reach)
            bound = lane[number - count] + 1 if count <= number else 0
            first = max(bound, begun, self._uses.ready(place)) if count else place
            if count and first == 0 and self._block[place].microbatch is not None:
                self._starts[place] = -1
            elif self._hides(place, first, place):
                self._starts[place] = first
            # One that starts in its place has ended before the next one starts.
            begun = self._starts.get(place, place + 1) if reach.ahead < ANY else 0

    def _num_ahead(self, lane: Sequence[int], number: int, reach: OverlapReach) -> int:
        """How many communications, up to one of a lane, may be there ahead of their place."""
        most, room = reach.ahead, reach.ahead_bytes
        if room is None:
            return most
        last = lane[max(0, number + 1 - most) : number + 1]
        sizes = accumulate(self._bytes_of(self._block[place]) for place in reversed(last))
        return sum(size <= room for size in sizes)

    def _wait(self, lane: Sequence[int], reach: OverlapReach) -> None:
        end = len(self._block)
        later = [*lane[reach.under_way :], *(end for _ in lane)]
        for place, bound in zip(lane, later, strict=False):
            if self._block[place].phase is not Phase.WHOLE:
                continue
            last = min(bound, self._uses.wanted(place, self._starts)) if reach.under_way else place
            if last == end and self._block[place].microbatch is not None:
                self._waits[place] = end + 1
            elif self._hides(place, place, last):
                self._waits[place] = last

    def _hides(self, place: int, first: int, last: int) -> bool:
        """Whether the devices of a communication compute between two positions."""
        devices = frozenset(self._block[place].devices)
        between = self._block[first:last]
        return any(i.kind in COMPUTING and not devices.isdisjoint(i.devices) for i in between)

    def rows(self) -> Iterator[Block]:
        """What is before all stages, at each position, and after all stages."""
        end = len(self._block)
        rows: dict[int, tuple[list[StepInstruction], ...]] = defaultdict(lambda: ([], [], []))
        for place, given in enumerate(self._block):
            first, last = self._starts.get(place, place), self._waits.get(place, place)
            if first == last:
                rows[place][2].append(given)
                continue
            of_step = replace(given, microbatch=None)
            rows[last][0].append((of_step if last > end else given).waited())
            rows[first][1].append((of_step if first < 0 else given).started())
        yield from (tuple(chain(*rows[position])) for position in range(-1, end + 2))


def _lanes(block: Block, reach: Mapping[Verb, OverlapReach], phase: Phase) -> Iterable[list[int]]:
    """The positions of communication of each kind and devices, whole or in a phase."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, i in enumerate(block):
        if i.kind in reach and i.phase in (Phase.WHOLE, phase) and not i.stays:
            found[i.kind, i.devices, i.microbatch].append(place)
    return found.values()
