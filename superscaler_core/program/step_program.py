"""Step program: one training step written out, as a text that is read back and can be checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.instruction import Carry, Event, StepInstruction, Verb, parse_event
from superscaler_core.schedules import Action

_HEAD = re.compile(r"step of (.+) on ([0-9]+(?:,[0-9]+)*)")
_BLOCK = re.compile(r"stage ([0-9]+) ([fFB]):")


@dataclass(frozen=True)
class StepProgram:
    """All that devices do in a step, in one order that every device keeps.

    What a stage does is written once for all microbatches, as its *block*; ``events`` say when a
    stage runs its block for which microbatch. Before all events weights come that are not in
    windows, and after them gradients go; ``instructions`` leaves both out.

    Law (tests/superscaler_core/program/test_step_program.py): ``StepProgram.parse(str(p)) == p``,
    and ``check`` accepts what ``materialize`` makes.

    Attributes:
        name: of the model.
        devices: ascending.
        blocks: by stage and run ("f", "F" or "B"), what all devices do.
        events: in order.
    """

    name: str
    devices: tuple[Device, ...]
    blocks: Mapping[tuple[int, str], tuple[StepInstruction, ...]]
    events: tuple[Event, ...]

    def instructions(self, device: Device) -> Iterator[tuple[StepInstruction, int]]:
        """What one device does inside stages, each instruction with its microbatch."""
        for event in self.events:
            if isinstance(event, Action):
                for instruction in self._mine.get((device, event.stage, event.kind), ()):
                    yield instruction, event.microbatch

    @cached_property
    def _mine(self) -> Mapping[tuple[Device, int, str], list[StepInstruction]]:
        found: dict[tuple[Device, int, str], list[StepInstruction]] = {}
        for (stage, run), block in self.blocks.items():
            for instruction in block:
                for device in instruction.devices:
                    found.setdefault((device, stage, run), []).append(instruction)
        return found

    # --- text -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"step of {self.name} on {','.join(map(str, self.devices))}"]
        for (stage, run), block in self.blocks.items():
            lines.append(f"stage {stage} {run}:")
            lines += [f"  {instruction}" for instruction in block]
        lines.append("order:")
        lines += [f"  {event}" for event in self.events]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> StepProgram:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: a line has another form; the text names it.
        """
        head, *lines = text.strip().splitlines() or [""]
        found = _HEAD.fullmatch(head.strip())
        if found is None:
            raise _unreadable(1, head, "step of NAME on DEVICE,DEVICE,...")
        blocks: dict[tuple[int, str], list[StepInstruction]] = {}
        events: list[Event] = []
        block: list[StepInstruction] | None = None
        is_order = False
        for number, line in enumerate(lines, 2):
            words = line.strip()
            if words == "order:":
                is_order = True
            elif (title := _BLOCK.fullmatch(words)) is not None:
                block = blocks.setdefault((int(title[1]), title[2]), [])
            elif is_order:
                events.append(_event(number, words))
            elif block is None:
                raise _unreadable(number, line, "stage NUMBER f, F or B:")
            else:
                block.append(StepInstruction.parse(words))
        devices = tuple(map(int, found[2].split(",")))
        return cls(found[1], devices, {key: tuple(b) for key, b in blocks.items()}, tuple(events))

    # --- what has to hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a program that cannot run as it stands.

        Every stage runs every microbatch forward once, and then back once, and has a block for
        it. On every device what a backward needs was kept by a forward, once; nothing that was kept
        is left at the end; weights are gathered before they are released; gradients of an edge go
        back after its value came. No two devices wait for each other, because all of them keep the
        one order of ``events`` and of each block.

        Raises:
            PlanError: names the instruction and what is missing.
        """
        self._check_events()
        for device in self.devices:
            _check_device(device, self.instructions(device))

    def _check_events(self) -> None:
        seen: Counter[Event] = Counter()
        for event in self.events:
            seen[event] += 1
            if isinstance(event, Carry):
                if event.is_back and not seen[replace(event, is_back=False)]:
                    raise PlanError(f"{event}: the value was not carried before its gradient.")
                continue
            if (event.stage, event.kind) not in self.blocks:
                raise PlanError(f"{event}: stage {event.stage} has no block {event.kind}.")
            if seen[event] > 1:
                raise PlanError(f"{event} is run twice.")
            forward = Action("F", event.stage, event.microbatch)
            if event.kind == "B" and not seen[forward]:
                raise PlanError(f"{event}: {forward} has to be run before it.")
        forwards = {a for a in seen if isinstance(a, Action) and a.kind == "F"}
        for action in forwards:
            back = Action("B", action.stage, action.microbatch)
            if back not in seen:
                raise PlanError(f"{action} has no {back} after it.")
        stages = {stage for stage, _ in self.blocks}
        microbatches = {action.microbatch for action in forwards}
        for stage in stages:
            for microbatch in microbatches:
                if Action("F", stage, microbatch) not in forwards:
                    raise PlanError(f"no F of microbatch {microbatch} at stage {stage}.")


_KEEPS = {Verb.FORWARD: Verb.BACKWARD, Verb.HOLD: Verb.BACKWARD, Verb.KEEP: Verb.RESUME}
"""What keeps something, and what takes it away again."""
_TAKES = frozenset(_KEEPS.values())


def _check_device(device: Device, instructions: Iterable[tuple[StepInstruction, int]]) -> None:
    """Follow what one device keeps and has gathered."""
    kept: set[tuple[Verb, str, int]] = set()
    gathered: set[str] = set()
    for instruction, microbatch in instructions:
        kind, name = instruction.kind, instruction.name
        what = f"device {device}, microbatch {microbatch}: {instruction}"
        if kind in _KEEPS:
            key = _KEEPS[kind], name, microbatch
            if key in kept:
                raise PlanError(f"{what} keeps what is kept already.")
            kept.add(key)
        elif kind in _TAKES:
            if (kind, name, microbatch) not in kept:
                raise PlanError(f"{what} needs what no forward has kept.")
            kept.remove((kind, name, microbatch))
        elif kind is Verb.GATHER:
            if name in gathered:
                raise PlanError(f"{what}: these weights are there already.")
            gathered.add(name)
        elif kind is Verb.RELEASE:
            if name not in gathered:
                raise PlanError(f"{what}: these weights were not gathered.")
            gathered.remove(name)
        elif kind is Verb.REDUCE:
            gathered.discard(name)
    if kept:
        kind, name, microbatch = min(kept)
        raise PlanError(f"device {device}: no {kind} {name} of microbatch {microbatch} is run.")


def _event(number: int, words: str) -> Event:
    try:
        return parse_event(words)
    except PlanError as error:
        raise PlanError(f"line {number} of a step program: {error}") from None


def _unreadable(number: int, line: str, expected: str) -> PlanError:
    return PlanError(
        f"cannot read line {number} of a step program, {line.strip()[:80]!r}: expected "
        f"'{expected}'."
    )
