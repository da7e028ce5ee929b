"""Duplex: a rewrite of a step program in which half a microbatch computes while the other moves.

Source: the Duplex of HiDup (Zhang et al., Accelerating Large-Scale Distributed Neural Network
Training with SPMD Parallelism, 2022). It overlaps halves of the forward; here those of backwards
overlap too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from superscaler_core.errors import PlanError
from superscaler_core.program.event import Event, P2PSend
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import MOVES, OF_WEIGHTS, Phase, Verb


def duplex(program: StepProgram) -> StepProgram:
    """Run every microbatch as two halves: one half computes while the other one communicates.

    Laws (tests/superscaler_core/program/test_duplex.py): each half runs the instructions of the
    program in their order; weights are gathered and reduced once for both halves; the second half
    never overtakes the first, and reads a buffer after the first half has replaced it.

    Args:
        program: a program whose microbatches run whole. Its weights' communication is not
            overlapped yet, but its moves may be.

    Returns:
        A program of twice as many microbatches, each half as large.
    """
    blocks = {
        key: joined(overlapped(_half(block, 0), _half(block, 1)))
        for key, block in program.blocks.items()
    }
    events = tuple(both_halves(program.events))
    num = 2 * program.num_microbatches
    return replace(program, blocks=blocks, events=events, num_microbatches=num, num_halves=2)


def both_halves(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with one transfer for each half; an action runs both halves."""
    for event in events:
        if isinstance(event, P2PSend):
            yield from (replace(event, microbatch=2 * event.microbatch + i) for i in (0, 1))
        else:
            yield event


def overlapped(
    first: Block, second: Block, shared: Collection[Verb] = OF_WEIGHTS
) -> Iterator[StepInstruction]:
    """Weave two orders of instructions into one: while one communicates, the other one computes.

    Each order runs until it has to wait for a move. Then it is the other's turn, which begins with
    the wait for its own move. So with computations A and communications C, two equal orders become:
    A1 of the first, {C1 of the first beside A1 of the second}, {C1 of the second beside A2 of the
    first}, and so on. All devices keep this one order.

    Instructions of weights are the same in both orders, and are done once: a gather when the first
    order comes to it, a release or a reduction when the second one does. The first order waits
    there for the second one, so the second one is never ahead.

    Args:
        first, second: whole instructions, or starts and waits; with the same instructions of
            shared kinds, in the same order.
        shared: the kinds of instructions that are done once for both orders.
    """
    ahead = _Order(first, shared)
    sides = ahead, _Order(second, shared, ahead)
    turn = num_idle = 0
    while any(side.left for side in sides):
        left = len(sides[turn].left)
        yield from sides[turn].run(sides[1 - turn])
        num_idle = num_idle + 1 if len(sides[turn].left) == left else 0
        if num_idle > 2:
            raise _cannot_weave(*sides)
        turn = 1 - turn


def _cannot_weave(first: _Order, second: _Order) -> PlanError:
    buffers = ", ".join(second.waits_for(second.left[0]))
    return PlanError(
        f"{second.left[0].short}: in the second half of a microbatch it reads {buffers} after the "
        f"first half has replaced it, but both halves do '{first.left[0].short}' together before. "
        "Use a plan that does not gather weights there, or no duplex."
    )


class _Order:
    """One of two overlapped orders.

    Attributes:
        left: the instructions that are still to run.
        num_passed: the number of instructions of weights that this order has passed.
    """

    def __init__(self, block: Block, shared: Collection[Verb], ahead: _Order | None = None) -> None:
        self.left = deque(_in_phases(block))
        self._shared, self._ahead = shared, ahead
        self.num_passed = 0
        self._replacing = Counter(_buffers(value for i in self.left for value in i.writes))

    def run(self, other: _Order) -> Iterator[StepInstruction]:
        """Run until the next wait for a move, or until the other order has to catch up."""
        while self.left and _is_wait(self.left[0]):
            yield self.left.popleft()
        while self.left and not _is_wait(self.left[0]):
            instruction = self.left[0]
            if self.waits_for(instruction):
                return
            if instruction.kind not in self._shared:
                self._replacing.subtract(_buffers(instruction.writes))
                yield self.left.popleft()
            elif instruction.kind is Verb.UNSHARD:
                if self.num_passed >= other.num_passed:
                    yield instruction
                self._pass()
            else:
                # Weights are dropped when both orders are here; then it is the first order's turn.
                if other.left[0].kind in self._shared and self.num_passed == other.num_passed:
                    yield instruction
                    self._pass()
                    other._pass()
                return

    def waits_for(self, instruction: StepInstruction) -> list[str]:
        """The buffers that an instruction reads, and that the order ahead has yet to replace."""
        if self._ahead is None:
            return []
        replacing = self._ahead._replacing
        return [key for key in _buffers(instruction.reads) if replacing[key] > 0]

    def _pass(self) -> None:
        """Leave an instruction of weights behind."""
        self.left.popleft()
        self.num_passed += 1


def _buffers(values: Iterable[Value]) -> Iterator[str]:
    return (value.name for value in values if value.role is Role.STATE)


def _is_wait(instruction: StepInstruction) -> bool:
    return instruction.kind in MOVES and instruction.phase is Phase.WAIT


def _half(block: Block, number: int) -> Block:
    """A block for one half; instructions of weights are for both."""
    return tuple(i if i.kind in OF_WEIGHTS else replace(i, half=number) for i in block)


def _in_phases(block: Block) -> Iterator[StepInstruction]:
    """A block in which every move is a start and a wait; independent moves start together."""
    under_way: list[StepInstruction] = []
    for now in block:
        is_move = now.kind in MOVES and now.phase is Phase.WHOLE
        if not is_move or any(_is_linked(now, move) for move in under_way):
            yield from (move.waited() for move in under_way)
            under_way = []
        if is_move and not now.stays:
            under_way.append(now)
            yield now.started()
        else:
            yield now
    yield from (move.waited() for move in under_way)


def _is_linked(move: StepInstruction, other: StepInstruction) -> bool:
    """Whether one of two moves is of a gradient and the other is not, or reads what it writes."""
    written = [value for one in (move, other) for value in one.writes]
    read = [value for one in (move, other) for value in one.reads]
    return move.kind is not other.kind or any(a.is_same(b) for a in written for b in read)


def joined(instructions: Iterable[StepInstruction]) -> Block:
    """The instructions, with one instruction in place of a start with its wait right behind it."""
    done: list[StepInstruction] = []
    for now in instructions:
        if now.phase is Phase.WAIT and done and done[-1].is_start_of(now):
            done[-1] = done[-1].whole(now)
        else:
            done.append(now)
    return tuple(done)
