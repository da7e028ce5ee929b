"""Overlap: rewrites of a step program so that communication runs while devices compute.

A communication is replaced by its ``START``, placed earlier, and its ``WAIT``, placed later. All
devices still keep one order, so no device waits for a later instruction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import Value
from superscaler_core.program.verb import COMPUTING, Phase, Verb
from superscaler_core.schedules import GRADS, Action, ActionKind

MOST_REDUCTIONS = 2
"""Reductions under way at one time: while one runs, the next is queued behind it without a gap."""


# --- swapping to host memory --------------------------------------------------------------------


def swap_beside(program: StepProgram, depth: int) -> StepProgram:
    """Copy to and from host memory while devices compute.

    A copy to the host runs beside the segments after it, and ends when the next swapped segment
    has run. A copy back starts when the copy ``depth`` before it has ended, or at the begin of the
    stage's run. So the values of ``depth + 1`` swapped segments are on a device at one time.

    Args:
        program: a program whose copies are not overlapped yet.
        depth: at least 1.
    """
    blocks = {
        key: tuple(_behind(_ahead(block, Verb.IN, depth), Verb.OUT, 1))
        for key, block in program.blocks.items()
    }
    return replace(program, blocks=blocks)


# --- weights come earlier -----------------------------------------------------------------------


def prefetch(program: StepProgram, depth: int) -> StepProgram:
    """Start the gather of weights ``depth`` gathers ahead of their ops.

    Inside a block the gather of a window starts when the gather ``depth`` windows before it has
    ended. Weights that are fetched for the whole step are waited for in the first forward that
    reads them, so the first ops run while the other weights arrive. If a backward directly
    follows its forward, the last window of the forward stays, and is not gathered again.

    Args:
        program: a program without such overlap.
        depth: at least 1.
    """
    blocks = dict(_without_release(program))
    blocks = {key: _ahead(block, Verb.GATHER, depth) for key, block in blocks.items()}
    return _fetched_ahead(replace(program, blocks=blocks), depth)


def _without_release(program: StepProgram) -> Iterator[tuple[tuple[int, ActionKind], Block]]:
    """The blocks, without a release of a window that is followed at once by its gather."""
    for (stage, run), block in program.blocks.items():
        back = _returns_at_once(program, stage)
        other = program.blocks.get((stage, ActionKind.FORWARD if run is back else back or run), ())
        if back and run is ActionKind.FORWARD and _is_at_edge(block, other):
            yield (stage, run), block[:-1]
        elif back and run is back and _is_at_edge(other, block):
            yield (stage, run), block[1:]
        else:
            yield (stage, run), block


def _is_at_edge(forward: Sequence[StepInstruction], backward: Sequence[StepInstruction]) -> bool:
    """Whether the forward ends with the release of the window that the backward gathers first."""
    if not forward or not backward:
        return False
    last, first = forward[-1], backward[0]
    is_pair = (last.kind, first.kind) == (Verb.RELEASE, Verb.GATHER)
    return is_pair and (last.name, last.devices) == (first.name, first.devices)


def _returns_at_once(program: StepProgram, stage: int) -> ActionKind | None:
    """The kind of a stage's backwards (B or I) if each comes right after its forward."""
    actions = [event for event in program.events if isinstance(event, Action)]
    mine = [action for action in actions if action.stage == stage]
    kinds = {action.kind for action in mine if action.kind.goes_back}
    pairs = [(a, b) for a, b in pairwise(mine) if b.kind.goes_back]
    is_paired = all(a.kind is ActionKind.FORWARD and a.microbatch == b.microbatch for a, b in pairs)
    # Other stages on the same devices may run between the two.
    return kinds.pop() if is_paired and len(kinds) == 1 and len(mine) == len(actions) else None


def _fetched_ahead(program: StepProgram, depth: int) -> StepProgram:
    """A program whose first forwards wait for the weights of the step, bucket by bucket."""
    first = _first_actions(program)
    begin: list[StepInstruction] = []
    fetches: dict[int, list[tuple[int, StepInstruction]]] = {}
    for fetch in program.begin:
        place = _first_read(program, fetch)
        action = None if place is None else first.get(place[0])
        if place is None or action is None or not _is_alone(program, fetch, place[0]):
            begin.append(fetch)
        else:
            mine = replace(fetch, microbatch=action.microbatch)
            fetches.setdefault(place[0], []).append((place[1], mine))
    blocks = dict(program.blocks)
    for stage, unordered in fetches.items():
        found = sorted(unordered, key=itemgetter(0))
        begin += [replace(fetch.started(), microbatch=None) for _, fetch in found[:depth]]
        inserted: dict[int, list[StepInstruction]] = {}
        for (number, fetch), later in zip(found, [*found[depth:], *[None] * depth], strict=False):
            here = inserted.setdefault(number, [])
            here.append(fetch.waited())
            if later is not None:
                here.append(later[1].started())
        key = stage, ActionKind.FORWARD
        blocks[key] = tuple(_inserted(blocks[key], inserted))
    return replace(program, begin=tuple(begin), blocks=blocks)


Place = tuple[int, int]
"""A stage, and a position in its block."""


def _first_read(program: StepProgram, fetch: StepInstruction) -> Place | None:
    """Where a forward first reads fetched weights; None if several stages read them."""
    blocks = {key: b for key, b in program.blocks.items() if key[1] is ActionKind.FORWARD}
    found = list(_places(blocks, fetch.writes, lambda instruction: instruction.reads))
    return min(found) if len({stage for stage, _ in found}) == 1 else None


def _last_grad(program: StepProgram, reduce: StepInstruction) -> Place | None:
    """Where a backward last adds to the reduced gradients; None if several stages do."""
    blocks = {key: block for key, block in program.blocks.items() if key[1] in GRADS}
    found = list(_places(blocks, reduce.reads, lambda instruction: instruction.writes))
    return max(found) if len({stage for stage, _ in found}) == 1 else None


def _places(
    blocks: Mapping[tuple[int, ActionKind], Block],
    values: Iterable[Value],
    of: Callable[[StepInstruction], Iterable[Value]],
) -> Iterator[Place]:
    """Where instructions that compute read, or write, any of these values."""
    wanted = {(value.role, value.name) for value in values}
    for (stage, _), block in blocks.items():
        for number, instruction in enumerate(block):
            is_of = any((value.role, value.name) in wanted for value in of(instruction))
            if is_of and instruction.kind in COMPUTING:
                yield stage, number


def _first_actions(program: StepProgram) -> Mapping[int, Action]:
    """For each stage its first run, if that is a forward."""
    found: dict[int, Action] = {}
    for event in program.events:
        if isinstance(event, Action):
            found.setdefault(event.stage, event)
    return {stage: action for stage, action in found.items() if action.kind is ActionKind.FORWARD}


# --- gradients leave earlier --------------------------------------------------------------------


def overlap_reductions(program: StepProgram) -> StepProgram:
    """Start reductions when the backward has completed their gradients, and wait for them later.

    At most two reductions are under way. Reductions of windows are waited for in the same block.
    Those at the step's end move into the last backward of their stage (or W, in a schedule with
    halves), and are waited for there or at the end. Weights that several stages share are still
    reduced at the end.
    """
    blocks = {
        key: tuple(_behind(block, Verb.REDUCE, MOST_REDUCTIONS))
        for key, block in program.blocks.items()
    }
    program = replace(program, blocks=blocks)
    last = _last_backwards(program)
    end: list[StepInstruction] = []
    starts: dict[int, dict[int, list[StepInstruction]]] = {}
    for reduce in program.end:
        place = _last_grad(program, reduce) if reduce.kind is Verb.REDUCE else None
        if place is None or place[0] not in last or not _is_alone(program, reduce, place[0]):
            end.append(reduce)
            continue
        mine = replace(reduce, microbatch=last[place[0]].microbatch)
        starts.setdefault(place[0], {}).setdefault(place[1] + 1, []).append(mine)
    waits: list[StepInstruction] = []
    for stage, leaving in starts.items():
        under_way = deque[StepInstruction]()
        for _, ready in sorted(leaving.items()):
            ready[:] = _bounded(tuple(ready), under_way, MOST_REDUCTIONS)
        key = stage, last[stage].kind
        blocks[key] = tuple(_inserted(blocks[key], leaving))
        waits += [replace(one.waited(), microbatch=None) for one in under_way]
    return replace(program, blocks=blocks, end=(*waits, *end))


def _last_backwards(program: StepProgram) -> Mapping[int, Action]:
    """For each stage the run that completes gradients last, if all such runs have one block."""
    actions = [e for e in program.events if isinstance(e, Action) and e.kind in GRADS]
    kinds = {(action.stage, action.kind) for action in actions}
    last = {action.stage: action for action in actions}
    return {s: action for s, action in last.items() if sum((s, k) in kinds for k in GRADS) == 1}


# --- pieces -------------------------------------------------------------------------------------


def _ahead(block: Block, kind: Verb, depth: int) -> Block:
    """A block whose communication of ``kind`` starts earlier, but not before its last release.

    Distances are counted among the communications of the same devices.
    """
    starts: dict[int, list[StepInstruction]] = {}
    before: dict[tuple[Device, ...], list[int]] = {}
    gone: dict[str, int] = {}
    for place, instruction in enumerate(block):
        if instruction.kind in (Verb.RELEASE, Verb.REDUCE):
            gone[instruction.name] = place + 1
        elif instruction.kind is kind:
            others = before.setdefault(instruction.devices, [])
            first = others[-depth] + 1 if len(others) >= depth else 0
            first = max(first, gone.get(instruction.name, 0))
            starts.setdefault(first, []).append(instruction.started())
            others.append(place)
    waiting = (i.waited() if i.kind is kind else i for i in block)
    return tuple(_inserted(tuple(waiting), starts))


def _behind(block: Block, kind: Verb, most: int) -> Iterator[StepInstruction]:
    """A block that waits later for communication of ``kind``: when ``most`` others are open."""
    under_way: dict[tuple[Device, ...], deque[StepInstruction]] = {}
    for instruction in block:
        if instruction.kind is kind and instruction.phase is Phase.WHOLE:
            mine = under_way.setdefault(instruction.devices, deque())
            yield from _bounded([instruction], mine, most)
        else:
            yield instruction
    for left in under_way.values():
        yield from (one.waited() for one in left)


def _bounded(
    given: Iterable[StepInstruction], under_way: deque[StepInstruction], most: int
) -> Iterator[StepInstruction]:
    """The starts, each after a wait for an earlier one if too many would be under way."""
    for instruction in given:
        if len(under_way) == most:
            yield under_way.popleft().waited()
        under_way.append(instruction)
        yield instruction.started()


def _is_alone(program: StepProgram, instruction: StepInstruction, stage: int) -> bool:
    """Whether all devices of an instruction run the stage, so that its block can contain it."""
    blocks = (block for (other, _), block in program.blocks.items() if other == stage)
    running = {device for block in blocks for i in block for device in i.devices}
    return running.issuperset(instruction.devices)


def _inserted(
    block: Block, more: Mapping[int, Sequence[StepInstruction]]
) -> Iterator[StepInstruction]:
    """A block with instructions inserted before the given positions."""
    for number, instruction in enumerate(block):
        yield from more.get(number, ())
        yield instruction
    yield from more.get(len(block), ())
