"""Checks: what one device keeps, has gathered and has under way, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.instruction import OF_MICROBATCH, Phase, StepInstruction, Verb

_KEEPS = {
    Verb.FORWARD: Verb.BACKWARD,
    Verb.HOLD: Verb.BACKWARD,
    Verb.KEEP: Verb.RESUME,
    Verb.BACKWARD_INPUTS: Verb.BACKWARD_WEIGHTS,
}
"""What keeps something, and what takes it away again; ``BACKWARD_INPUTS`` takes as ``BACKWARD``."""

_TAKES = {verb: verb for verb in _KEEPS.values()} | {Verb.BACKWARD_INPUTS: Verb.BACKWARD}

_READS = _TAKES | {Verb.RERUN: Verb.BACKWARD, Verb.OUT: Verb.BACKWARD}
"""What needs something that was kept, and for what that was."""


def check_device(device: Device, instructions: Iterable[tuple[StepInstruction, int]]) -> None:
    """Refuse what one device cannot do in this order; ``StepProgram.check`` says what that is.

    Args:
        device: which.
        instructions: of it, each with its microbatch.

    Raises:
        PlanError: names the instruction and what is missing.
    """
    here = _Device(device)
    for instruction, microbatch in instructions:
        here.do(instruction, microbatch)
    here.end()


class _Device:
    """Follows one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: set[tuple[Verb, str, int]] = set()
        self._away: set[tuple[str, int]] = set()
        self._gathered: set[str] = set()
        self._started: dict[tuple[Verb, str, int], StepInstruction] = {}
        self._now = ""

    def do(self, instruction: StepInstruction, microbatch: int) -> None:
        """One instruction, for one microbatch."""
        self._now = f"device {self._device}, microbatch {microbatch}: {instruction}"
        kind, name = instruction.kind, instruction.name
        # Weights that come for one microbatch may be waited for by another.
        key = kind, name, microbatch if kind in OF_MICROBATCH else -1
        if instruction.phase is not Phase.WAIT:
            self._need(key not in self._started, "it is under way already.")
            self._begin(kind, name, microbatch)
        if instruction.phase is Phase.START:
            self._started[key] = instruction
        elif instruction.phase is Phase.WAIT:
            begun = self._started.pop(key, None)
            if begun is None:
                raise PlanError(f"{self._now}: nobody has started it.")
            self._need(begun.devices == instruction.devices, f"it was started as {begun}.")
        if kind is Verb.IN and instruction.phase is not Phase.START:
            self._away.remove((name, microbatch))

    def _begin(self, kind: Verb, name: str, microbatch: int) -> None:
        """What an instruction needs when it begins, and what it changes."""
        here = name, microbatch
        if kind in _READS:
            maker = "I" if kind is Verb.BACKWARD_WEIGHTS else "forward"
            is_kept = (_READS[kind], *here) in self._kept
            self._need(is_kept, f"it needs what no {maker} has kept.")
            is_here = here not in self._away or _READS[kind] is not Verb.BACKWARD
            self._need(is_here, "what was kept is in host memory.")
        if kind in _TAKES:
            self._kept.remove((_TAKES[kind], *here))
        if kind in _KEEPS:
            key = _KEEPS[kind], *here
            self._need(key not in self._kept, "it keeps what is kept already.")
            self._kept.add(key)
        match kind:
            case Verb.OUT:
                self._away.add(here)
            case Verb.IN:
                self._need(here in self._away, "nothing of it is in host memory.")
                is_there = (Verb.OUT, *here) not in self._started
                self._need(is_there, "it is still on its way to host memory.")
            case Verb.GATHER:
                self._need(name not in self._gathered, "these weights are there already.")
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
        """Nothing is left at a step's end."""
        for instruction in self._started.values():
            raise PlanError(f"device {self._device}: nobody waits for {instruction}.")
        for kind, name, microbatch in sorted(self._kept):
            raise PlanError(
                f"device {self._device}: no {kind} {name} of microbatch {microbatch} is run."
            )
