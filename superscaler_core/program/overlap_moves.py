"""Overlap of moves: tensor parallelism's communication inside a stage runs beside computing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import COMPUTING, Phase, StepInstruction, Verb
from superscaler_core.program.step_program import Block, StepProgram
from superscaler_core.program.transfer import Transfer


def overlap_moves(program: StepProgram) -> StepProgram:
    """Let values and gradients move inside stages while devices compute what does not need them.

    A gradient goes back while the gradients of weights are computed: the backward of the segment
    before it is divided into its halves, and the second one runs before the wait. A value starts to
    move where it is complete, if devices compute something else until it is read.

    Args:
        program: whose instructions know what they are about (``StepInstruction.what``).
    """
    blocks = {key: tuple(_back(tuple(_early(b)))) for key, b in program.blocks.items()}
    return replace(program, blocks=blocks)


# --- values -------------------------------------------------------------------------------------


def _early(block: Block) -> Iterator[StepInstruction]:
    """A block whose moves start behind what makes their value."""
    starts: dict[int, list[StepInstruction]] = {}
    waits: set[int] = set()
    for place, move in enumerate(block):
        if move.kind is not Verb.MOVE or _is_idle(move.what.forward):
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
    """Whether an edge takes something that an instruction makes, or brings back to be run again."""
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
        moves = _moved_together(block, place)
        halves = _divided(done, last, moves)
        if not halves:
            moves = block[place : place + 1]
        place += len(moves)
        for number, backward in halves.items():
            done[number] = replace(backward, kind=Verb.BACKWARD_INPUTS)
        weights = [replace(b, kind=Verb.BACKWARD_WEIGHTS) for b in halves.values()]
        moved = moves if not halves else _beside(moves, weights)
        for instruction in moved:
            last |= dict.fromkeys(instruction.devices, len(done))
            done.append(instruction)
    yield from done


def _moved_together(block: Block, place: int) -> Sequence[StepInstruction]:
    """Gradients from a place on that move one behind the other, and none of which needs another."""
    found: list[StepInstruction] = []
    for instruction in block[place:]:
        if instruction.kind is not Verb.MOVE_BACK:
            break
        if any(before.what.parent is instruction.what for before in found):
            break
        found.append(instruction)
    return found


def _divided(
    done: Sequence[StepInstruction],
    last: Mapping[Device, int],
    moves: Sequence[StepInstruction],
) -> Mapping[int, StepInstruction]:
    """By place, the backwards of segments with weights that devices have just run before moves."""
    moving = (i for i in moves if not _is_idle(i.what.backward))
    places = {last[device] for i in moving for device in i.devices if device in last}
    return {
        place: done[place]
        for place in sorted(places)
        if done[place].kind is Verb.BACKWARD and done[place].what.has_weights
    }


def _beside(
    moves: Sequence[StepInstruction], computed: Sequence[StepInstruction]
) -> Iterator[StepInstruction]:
    """Moves with something that is computed while they are under way."""
    moving = [i for i in moves if not _is_idle(i.what.backward)]
    yield from (replace(i, phase=Phase.START) if i in moving else i for i in moves)
    yield from computed
    yield from (replace(i, phase=Phase.WAIT) for i in moving)


def _is_idle(legs: Sequence[Transfer]) -> bool:
    """Whether nothing moves along these legs."""
    return all(leg.is_idle for leg in legs)
