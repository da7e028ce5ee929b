"""Overlap of moves: tensor-parallel communication inside a stage runs while devices compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from superscaler_core.plan import Device
from superscaler_core.program.edges import Edges
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import COMPUTING, MOVES, Phase, Verb


def overlap_moves(program: StepProgram) -> StepProgram:
    """Move values and gradients inside stages while devices compute independent results.

    A gradient moves while gradients of weights are computed: the backward of the segment before
    it is split into its halves, and the second half runs before the wait. A value starts to move
    as soon as it is complete, if devices compute anything else before it is read.

    """
    blocks = {key: tuple(_back(tuple(_early(b)))) for key, b in program.blocks.items()}
    return replace(program, blocks=blocks)


# --- values -------------------------------------------------------------------------------------


def _early(block: Block) -> Iterator[StepInstruction]:
    """A block whose moves start directly after their value is computed."""
    starts: dict[int, list[StepInstruction]] = {}
    waits: set[int] = set()
    for place, move in enumerate(block):
        if move.kind is not Verb.MOVE or move.stays:
            continue
        first = place
        while first and not _makes(block[first - 1], move):
            first -= 1
        between = block[first:place]
        if any(i.kind in COMPUTING and i.devices[0] in move.devices for i in between):
            starts.setdefault(first, []).append(move.started())
            waits.add(place)
    for place, instruction in enumerate(block):
        yield from starts.get(place, ())
        yield instruction.waited() if place in waits else instruction


def _makes(instruction: StepInstruction, move: StepInstruction) -> bool:
    """Whether an instruction makes a value that moves, or keeps the values before a span."""
    if instruction.kind is Verb.KEEP:
        return not set(move.devices).isdisjoint(instruction.devices)
    return any(made.is_same(read) for made in instruction.writes for read in move.reads)


# --- gradients ----------------------------------------------------------------------------------


def _back(block: Block) -> Iterator[StepInstruction]:
    """A block in which gradients of weights are computed while other gradients move."""
    done: list[StepInstruction] = []
    last: dict[Device, int] = {}
    place = 0
    while place < len(block):
        is_back = block[place].kind is Verb.MOVE_BACK
        moves = moved_together(block, place) if is_back else ()
        whole = _divided(done, last, moves)
        if not whole:
            moves = block[place : place + 1]
        place += len(moves)
        weights = []
        for number, backward in whole.items():
            done[number], late = in_halves(backward)
            weights.append(late)
        moved = moves if not whole else beside(moves, weights)
        for instruction in moved:
            last |= dict.fromkeys(instruction.devices, len(done))
            done.append(instruction)
    yield from done


def _divided(
    done: Sequence[StepInstruction],
    last: Mapping[Device, int],
    moves: Sequence[StepInstruction],
) -> Mapping[int, StepInstruction]:
    """By position, the backwards with gradients of weights that devices ran directly before."""
    moving = (i for i in moves if not i.stays)
    places = {last[device] for i in moving for device in i.devices if device in last}
    return {
        place: done[place]
        for place in sorted(places)
        if done[place].kind is Verb.BACKWARD
        and any(value.role is Role.SUM for value in done[place].writes)
    }


def in_halves(backward: StepInstruction) -> tuple[StepInstruction, StepInstruction]:
    """The backward of a segment as two instructions: for its inputs, and for its weights."""
    name = backward.name
    kept, sums = Value(Role.HALF, name), _of(backward.writes, Role.SUM)
    grads = tuple(value for value in backward.writes if value.role is not Role.SUM)
    weights = _of(backward.reads, Role.COPY, Role.WEIGHT)
    first = replace(backward, kind=Verb.BACKWARD_INPUTS, writes=(*grads, kept))
    late = replace(
        backward, kind=Verb.BACKWARD_WEIGHTS, reads=(*weights, kept), writes=sums, frees=(kept,)
    )
    return first, late


def _of(values: Iterable[Value], *roles: Role) -> tuple[Value, ...]:
    return tuple(value for value in values if value.role in roles)


# --- several moves ------------------------------------------------------------------------------


def moved_together(block: Block, place: int) -> Block:
    """The longest run of independent whole moves of one direction, from a position on."""
    found: list[StepInstruction] = []
    for move in block[place:]:
        if move.kind not in MOVES or move.phase is not Phase.WHOLE:
            break
        if any(move.kind is not other.kind or _is_linked(move, other) for other in found):
            break
        found.append(move)
    return tuple(found)


def _is_linked(move: StepInstruction, other: StepInstruction) -> bool:
    """Whether one of two moves reads what the other one writes."""
    pairs = ((move.writes, other.reads), (other.writes, move.reads))
    return any(made.is_same(read) for writes, reads in pairs for made in writes for read in reads)


def beside(
    moves: Sequence[StepInstruction], computed: Sequence[StepInstruction]
) -> Iterator[StepInstruction]:
    """Moves, with instructions that compute while the moves are under way."""
    yield from (i if i.stays else i.started() for i in moves)
    yield from computed
    yield from (i.waited() for i in moves if not i.stays)


def has_moves(edges: Edges) -> bool:
    """Whether anything moves inside a stage."""
    inside = (edge for edge in edges.all if not edge.crosses)
    return any(not leg.is_idle for edge in inside for leg in (*edge.forward, *edge.backward))
