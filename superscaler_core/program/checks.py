"""Checks: which values devices keep, which communication is open, which weight versions exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.event import Event, weights_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import COMPUTING, OF_MICROBATCH, Phase, Verb
from superscaler_core.schedules import Action, ActionKind

_KEEPS = {
    Verb.FORWARD: Verb.BACKWARD,
    Verb.HOLD: Verb.BACKWARD,
    Verb.KEEP: Verb.RESUME,
    Verb.BACKWARD_INPUTS: Verb.BACKWARD_WEIGHTS,
}
"""Instructions that keep values, each with the one that takes them. ``BACKWARD_INPUTS`` may take
those that are kept for ``BACKWARD``."""

_TAKES = {verb: verb for verb in _KEEPS.values()} | {Verb.BACKWARD_INPUTS: Verb.BACKWARD}

_READS = _TAKES | {Verb.RERUN: Verb.BACKWARD, Verb.OUT: Verb.BACKWARD}
"""Instructions that need a kept value, each with the instruction for which it is kept."""


def check_device(device: Device, instructions: Iterable[tuple[StepInstruction, int]]) -> None:
    """Check that one device can run its instructions in this order; see ``StepProgram.check``.

    Args:
        device: the device.
        instructions: the instructions of the device, each with its microbatch.

    Raises:
        PlanError: names the instruction and what is missing.
    """
    here = _Device(device)
    for instruction, microbatch in instructions:
        here.do(instruction, microbatch)
    here.end()


class _Device:
    """The state of one device after the instructions so far."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: set[tuple[Verb, str, int]] = set()
        self._away: set[tuple[str, int]] = set()
        self._gathered: set[str] = set()
        self._started: dict[tuple[Verb, str, int], StepInstruction] = {}
        self._now = ""

    def do(self, instruction: StepInstruction, microbatch: int) -> None:
        """Check one instruction for one microbatch, and update the state."""
        self._now = f"device {self._device}, microbatch {microbatch}: {instruction}"
        kind, name = instruction.kind, instruction.name
        # Communication of weights that was started for one microbatch may be waited for by another.
        key = kind, name, microbatch if kind in OF_MICROBATCH else -1
        if instruction.phase is not Phase.WAIT:
            self._need(key not in self._started, "it is under way already.")
            self._begin(kind, name, microbatch)
        if instruction.phase is Phase.START:
            self._started[key] = instruction
        elif instruction.phase is Phase.WAIT:
            begun = self._started.pop(key, None)
            if begun is None:
                raise PlanError(f"{self._now}: it was not started.")
            self._need(begun.devices == instruction.devices, f"it was started as {begun}.")
        if kind is Verb.IN and instruction.phase is not Phase.START:
            self._away.remove((name, microbatch))

    def _begin(self, kind: Verb, name: str, microbatch: int) -> None:
        """Check what an instruction needs when it begins, and record what it changes."""
        here = name, microbatch
        if kind in _READS:
            maker = "I" if kind is Verb.BACKWARD_WEIGHTS else "forward"
            is_kept = (_READS[kind], *here) in self._kept
            self._need(is_kept, f"no {maker} has kept the values that it needs.")
            is_here = here not in self._away or _READS[kind] is not Verb.BACKWARD
            self._need(is_here, "the kept values are in host memory.")
        if kind in _TAKES:
            self._kept.remove((_TAKES[kind], *here))
        if kind in _KEEPS:
            key = _KEEPS[kind], *here
            self._need(key not in self._kept, "its values are kept already.")
            self._kept.add(key)
        match kind:
            case Verb.OUT:
                self._away.add(here)
            case Verb.IN:
                self._need(here in self._away, "none of its values are in host memory.")
                is_there = (Verb.OUT, *here) not in self._started
                self._need(is_there, "it is still on its way to host memory.")
            case Verb.GATHER:
                self._need(name not in self._gathered, "these weights are gathered already.")
                self._gathered.add(name)
            case Verb.RELEASE | Verb.REDUCE:
                is_there = (Verb.GATHER, name, -1) not in self._started
                self._need(is_there, "its weights are still on their way.")
                is_there = kind is Verb.REDUCE or name in self._gathered
                self._need(is_there, "these weights were not gathered.")
                self._gathered.discard(name)

    def _need(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise PlanError(f"{self._now}: {otherwise}")

    def end(self) -> None:
        """Check that nothing is left at the end of the step."""
        for instruction in self._started.values():
            raise PlanError(f"device {self._device}: no instruction waits for {instruction}.")
        for kind, name, microbatch in sorted(self._kept):
            raise PlanError(
                f"device {self._device}: no {kind} {name} of microbatch {microbatch} is run."
            )


# --- versions of weights ------------------------------------------------------------------------


def check_versions(walk: Callable[[], Iterable[tuple[StepInstruction, int, int]]]) -> None:
    """Check that every version of weights exists when it is read, and that no update is early.

    A reduction at the end of a step may be for any stage whose weights its devices store. A stage
    without an update has no trained weights.

    Args:
        walk: all instructions in the program's order, each with its stage and microbatch.

    Raises:
        PlanError: names the instruction and the version.
    """
    updating: dict[str, set[Device]] = {}
    for instruction, _, _ in walk():
        if instruction.kind is Verb.UPDATE:
            updating.setdefault(instruction.name, set()).update(instruction.devices)
    versions = _Versions(updating)
    for instruction, stage, microbatch in walk():
        versions.do(instruction, stage, microbatch)
    for waiting in versions.waiting.values():
        raise PlanError(f"{waiting}: no update comes after it.")


class _Versions:
    """The versions of the weights of all stages.

    Args:
        updating: for each stage's weights, by name, the devices that update them.

    Attributes:
        waiting: for each stage's weights, the last instruction whose gradients wait for an update.
    """

    def __init__(self, updating: Mapping[str, Collection[Device]]) -> None:
        self._updating = updating
        self._kept: dict[str, tuple[int, ...]] = {}
        self._read: dict[tuple[int, int], int] = {}
        self._started: dict[str, StepInstruction] = {}
        self.waiting: dict[str, StepInstruction] = {}

    def do(self, instruction: StepInstruction, stage: int, microbatch: int) -> None:
        """Check one instruction, and record what it changes."""
        if instruction.kind in COMPUTING:
            self._compute(instruction, stage, microbatch)
        elif instruction.kind is Verb.REDUCE:
            self._reduce(instruction, stage)
        elif instruction.kind is Verb.UPDATE:
            self._update(instruction)

    def _compute(self, instruction: StepInstruction, stage: int, microbatch: int) -> None:
        name, version = weights_of(stage), instruction.version
        kept = self._kept.get(name, (0,))
        first = self._read.setdefault((stage, microbatch), version)
        if version != first and not (first not in kept and version == kept[-1]):
            raise PlanError(
                f"{instruction}: stage {stage} has read version {first} for microbatch "
                f"{microbatch}, and reads version {version} now."
            )
        if version not in kept:
            raise PlanError(
                f"{instruction}: version {version} of the weights of {name} is not kept; there is "
                f"{', '.join(map(str, kept))}."
            )
        if instruction.kind in (Verb.BACKWARD, Verb.BACKWARD_WEIGHTS) and name in self._updating:
            self.waiting[name] = instruction

    def _reduce(self, instruction: StepInstruction, stage: int) -> None:
        if instruction.phase is Phase.START:
            self._started[instruction.name] = instruction
            return
        self._started.pop(instruction.name, None)
        for name, devices in self._updating.items():
            is_of = name == weights_of(stage) if stage >= 0 else True
            if is_of and not set(devices).isdisjoint(instruction.devices):
                self.waiting[name] = instruction

    def _update(self, instruction: StepInstruction) -> None:
        name, kept = instruction.name, self._kept.get(instruction.name, (0,))
        if instruction.version != kept[-1] + 1:
            raise PlanError(f"{instruction}: the next version of these weights is {kept[-1] + 1}.")
        for reduce in self._started.values():
            if not set(instruction.devices).isdisjoint(reduce.devices):
                raise PlanError(f"{instruction}: gradients are still on their way, by {reduce}.")
        self._kept[name] = (*kept, instruction.version)[-instruction.keeps :]
        self.waiting.pop(name, None)


def check_borrowed(
    events: Iterable[Event], borrowed: Mapping[tuple[Action, int], int], num_kept: Mapping[int, int]
) -> None:
    """Check that borrowed versions exist when they are read, and that owners update last.

    Args:
        events: all events, in order.
        borrowed: as in ``StepProgram``.
        num_kept: for each stage with updates, the number of versions that exist after one.

    Raises:
        PlanError: names the action and the stage that owns the weights.
    """
    borrowers: dict[int, set[int]] = {}
    for action, owner in borrowed:
        borrowers.setdefault(owner, set()).add(action.stage)
    made: Counter[int] = Counter()
    seen: set[Event] = set()
    for event in events:
        seen.add(event)
        if not isinstance(event, Action):
            continue
        if event.kind is ActionKind.UPDATE:
            made[event.stage] += 1
            for stage in sorted(borrowers.get(event.stage, ())):
                if replace(event, stage=stage) not in seen:
                    raise PlanError(
                        f"{event}: stage {stage} borrows weights of stage {event.stage}, and hands "
                        "its gradients over later."
                    )
            continue
        for owner in [owner for owner, by in borrowers.items() if event.stage in by]:
            newest, version = made[owner], borrowed.get((event, owner))
            kept = range(max(0, newest + 1 - num_kept.get(owner, 1)), newest + 1)
            if version not in kept:
                raise PlanError(
                    f"{event}: it reads version {version} of the weights of stage {owner}, and "
                    f"there is {', '.join(map(str, kept))}."
                )
            first = borrowed.get((replace(event, kind=ActionKind.FORWARD), owner))
            if version != first and len(kept) > 1:
                raise PlanError(
                    f"{event}: it reads version {version} of the weights of stage {owner}, and its "
                    f"forward has read version {first}."
                )
