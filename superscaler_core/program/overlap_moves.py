"""Overlap of moves: tensor-parallel communication inside a stage runs while devices compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge, Edges
from superscaler_core.program.instruction import COMPUTING, MOVES, Phase, StepInstruction, Verb
from superscaler_core.program.step_program import Block, StepProgram


def overlap_moves(program: StepProgram) -> StepProgram:
    """Move values and gradients inside stages while devices compute independent results.

    A gradient moves while gradients of weights are computed: the backward of the segment before
    it is split into its halves, and the second half runs before the wait. A value starts to move
    as soon as it is complete, if devices compute anything else before it is read.

    Args:
        program: a program whose instructions have their objects (``StepInstruction.what``).
    """
    blocks = {key: tuple(_back(tuple(_early(b)))) for key, b in program.blocks.items()}
    return replace(program, blocks=blocks)


# --- values -------------------------------------------------------------------------------------


def _early(block: Block) -> Iterator[StepInstruction]:
    """A block whose moves start directly after their value is computed."""
    starts: dict[int, list[StepInstruction]] = {}
    waits: set[int] = set()
    for place, move in enumerate(block):
        if move.kind is not Verb.MOVE or is_idle(move):
            continue
        first = place
        while first and not _makes(block[first - 1], move.what):
            first -= 1
        between = block[first:place]
        if any(i.kind in COMPUTING and i.devices[0] in move.devices for i in between):
            starts.setdefault(first, []).append(replace(move, phase=Phase.START))
            waits.add(place)
    for place, instruction in enumerate(block):
        yield from starts.get(place, ())
        yield replace(instruction, phase=Phase.WAIT) if place in waits else instruction


def _makes(instruction: StepInstruction, edge: Edge) -> bool:
    """Whether an instruction computes the value of an edge, or restores it for a rerun."""
    kind, what = instruction.kind, instruction.what
    if kind in (Verb.KEEP, Verb.RESUME):
        return not set(edge.devices).isdisjoint(instruction.devices)
    if kind is Verb.MOVE:
        return what is edge.parent
    makes = kind in (Verb.FORWARD, Verb.COMPUTE)
    return makes and any(edge.tensor in part.op.outputs for part in what.parts)


# --- gradients ----------------------------------------------------------------------------------


def _back(block: Block) -> Iterator[StepInstruction]:
    """A block in which gradients of weights are computed while other gradients move."""
    done: list[StepInstruction] = []
    last: dict[Device, int] = {}
    place = 0
    while place < len(block):
        is_back = block[place].kind is Verb.MOVE_BACK
        moves = moved_together(block, place) if is_back else ()
        halves = _divided(done, last, moves)
        if not halves:
            moves = block[place : place + 1]
        place += len(moves)
        for number, backward in halves.items():
            done[number] = replace(backward, kind=Verb.BACKWARD_INPUTS)
        weights = [replace(b, kind=Verb.BACKWARD_WEIGHTS) for b in halves.values()]
        moved = moves if not halves else beside(moves, weights)
        for instruction in moved:
            last |= dict.fromkeys(instruction.devices, len(done))
            done.append(instruction)
    yield from done


def _divided(
    done: Sequence[StepInstruction],
    last: Mapping[Device, int],
    moves: Sequence[StepInstruction],
) -> Mapping[int, StepInstruction]:
    """By position, the backwards of segments with weights that devices ran directly before."""
    moving = (i for i in moves if not is_idle(i))
    places = {last[device] for i in moving for device in i.devices if device in last}
    return {
        place: done[place]
        for place in sorted(places)
        if done[place].kind is Verb.BACKWARD and done[place].what.has_weights
    }


# --- several moves ------------------------------------------------------------------------------


def moved_together(block: Block, place: int) -> Block:
    """The longest run of independent whole moves of one direction, from a position on."""
    found: list[StepInstruction] = []
    for move in block[place:]:
        if move.kind not in MOVES or move.phase is not Phase.WHOLE:
            break
        if any(move.kind is not other.kind or _is_linked(move.what, other.what) for other in found):
            break
        found.append(move)
    return tuple(found)


def _is_linked(edge: Edge, other: Edge) -> bool:
    """Whether one of two edges forwards the result of the other."""
    return edge.parent is other or other.parent is edge


def beside(
    moves: Sequence[StepInstruction], computed: Sequence[StepInstruction]
) -> Iterator[StepInstruction]:
    """Moves, with instructions that compute while the moves are under way."""
    moving = [i for i in moves if not is_idle(i)]
    yield from (replace(i, phase=Phase.START) if i in moving else i for i in moves)
    yield from computed
    yield from (replace(i, phase=Phase.WAIT) for i in moving)


def has_moves(edges: Edges) -> bool:
    """Whether anything moves inside a stage."""
    inside = (edge for edge in edges.all if not edge.crosses)
    return any(not leg.is_idle for edge in inside for leg in (*edge.forward, *edge.backward))


def is_idle(move: StepInstruction) -> bool:
    """Whether a move, or a move back, moves nothing."""
    edge: Edge = move.what
    return all(leg.is_idle for leg in (edge.forward if move.kind is Verb.MOVE else edge.backward))
