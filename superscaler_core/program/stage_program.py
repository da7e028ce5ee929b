"""Stage program: the forward and the backward of one stage, written out for all devices.

Nobody else decides in which order a stage runs, what runs again, or what has a backward. Code is
generated from it, time and memory are found from it, and reports count its instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from superscaler_core.plan import Device
from superscaler_core.plan.savings import Window
from superscaler_core.program.instruction import StepInstruction, Verb
from superscaler_core.program.segments import Segment, StageItems, Step, device_steps
from superscaler_core.program.sequence import Close, Compute, Move, Open

RUNS = ("f", "F", "B")
"""A stage runs forward without gradient, forward, or backward."""


@dataclass(frozen=True, eq=False)
class StageProgram:
    """What all devices do in one stage for one microbatch.

    Laws (tests/superscaler_core/program/test_step_program.py): every ``BACKWARD`` takes what one
    ``FORWARD`` or ``HOLD`` before it kept; what generated code does, as it is recorded, is the
    program, in its order.

    Attributes:
        given: the stage.
    """

    given: StageItems

    @cached_property
    def steps(self) -> Mapping[Device, tuple[Step, ...]]:
        """By device, the forward as segments and items of communication."""
        return device_steps(self.given)

    @cached_property
    def order(self) -> Mapping[str, tuple[StepInstruction, ...]]:
        """By run, what all devices do, in an order that each of them keeps."""
        forward = tuple(self._in_order(is_back=False))
        turn = tuple(
            replace(i, kind=Verb.COMPUTE) if i.kind is Verb.FORWARD else i
            for i in forward
            if i.kind is not Verb.KEEP
        )
        return {"f": turn, "F": forward, "B": tuple(self._in_order(is_back=True))}

    @cached_property
    def _on(self) -> Mapping[tuple[str, Device], Sequence[StepInstruction]]:
        found: dict[tuple[str, Device], list[StepInstruction]] = {}
        for run in RUNS:
            for instruction in self.order[run]:
                for device in instruction.devices:
                    found.setdefault((run, device), []).append(instruction)
        return found

    def on(self, device: Device, run: str) -> Sequence[StepInstruction]:
        """What one device does."""
        return self._on.get((run, device), ())

    # --- the order of all devices ---------------------------------------------------------------

    def _in_order(self, *, is_back: bool) -> Iterator[StepInstruction]:
        """What all devices do: what they do together once, each one's segments before what follows.

        All devices meet communication in the order of the stage's items.
        """
        given = self.given
        left = {
            device: list(self._one_way(mine, is_back))[::-1] for device, mine in self.steps.items()
        }
        together = [item for item in given.items if not isinstance(item, Compute)]
        for wanted in self._one_way(together, is_back):
            if isinstance(wanted, _Border):
                continue
            devices = [d for d in given.taking_part[wanted.step] if d in left]
            for device in devices:
                while (mine := left[device].pop()) != wanted:
                    yield from self._written(mine, (device,))
            yield from self._written(wanted, tuple(devices))
        for device, rest in left.items():
            for mine in reversed(rest):
                yield from self._written(mine, (device,))

    def _one_way(self, steps: Iterable[Step], is_back: bool) -> Iterator[_Turn | _Border]:
        """Steps in the order run: a backward begins every span by running it forward again."""
        spans = [(span, list(run)) for span, run in groupby(steps, self.given.span)]
        for span, run in spans[::-1] if is_back else spans:
            if span:
                yield _Border(span, is_back)
            if not is_back:
                yield from (_Turn(step, is_back=False) for step in run)
                continue
            if span:
                yield from (_Turn(step, is_back=False, is_again=True) for step in run)
            yield from (_Turn(step, is_back=True) for step in reversed(run))

    # --- instructions ---------------------------------------------------------------------------

    def _written(
        self, turn: _Turn | _Border, devices: tuple[Device, ...]
    ) -> Iterator[StepInstruction]:
        """The instruction of a step on devices; nothing where there is nothing to do."""
        if not devices:
            return
        if isinstance(turn, _Border):
            kind = Verb.RESUME if turn.is_back else Verb.KEEP
            yield StepInstruction(kind, f"span{turn.span}", devices, turn.span)
            return
        step = turn.step
        if isinstance(step, Segment):
            if (kind_of := _kind_of(step, turn)) is not None:
                yield StepInstruction(kind_of, step.name, devices, step)
        elif isinstance(step, Move):
            edge = step.edge
            if not turn.is_back:
                yield StepInstruction(Verb.MOVE, edge.name, devices, edge)
            elif edge.backward:
                yield StepInstruction(Verb.MOVE_BACK, edge.name, devices, edge)
        elif isinstance(step, Open | Close):
            opens = isinstance(step, Open)
            if opens and turn.is_back:
                yield StepInstruction(Verb.REDUCE, self._name(step.window), devices, step.window)
            elif step.window.gathers:
                kind = Verb.GATHER if opens != turn.is_back else Verb.RELEASE
                yield StepInstruction(kind, self._name(step.window), devices, step.window)

    def _name(self, window: Window) -> str:
        return f"w{self.given.plan.windows.index(window)}"


@dataclass(frozen=True, slots=True)
class _Turn:
    """A step on its way forward, forward again in a backward, or back."""

    step: Step
    is_back: bool
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class _Border:
    """Where a span begins on a device: to be kept, or, in a backward, to be run again."""

    span: int
    is_back: bool


def _kind_of(segment: Segment, turn: _Turn) -> Verb | None:
    if turn.is_back:
        return Verb.BACKWARD if segment.has_backward else None
    if turn.is_again and segment.is_left_out:
        return Verb.HOLD if segment.has_backward else None
    # What runs again later keeps nothing the first time.
    is_differentiated = segment.has_backward and (turn.is_again or not segment.span)
    return Verb.FORWARD if is_differentiated else Verb.COMPUTE
