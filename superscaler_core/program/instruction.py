"""Instruction: one thing that devices do; a stage's block consists of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.value import NUMBERS, Role, Value
from superscaler_core.program.verb import OWN, Phase, Verb

_TEXT = re.compile(
    rf"(?:(start|wait) )?({'|'.join(Verb)}) (\S+) on ({NUMBERS})"
    r"( stays)?(?: half ([01]))?(?: at ([0-9]{1,9}))?(?: v([0-9]{1,9}))?"
    r"(?: keeps ([1-9][0-9]{0,8}))?"
)


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """One thing that a group of devices does together, or that one device does alone.

    Law (tests/superscaler_core/program/test_step_program.py): ``parse`` reads what ``str`` writes.

    Attributes:
        kind: what is done.
        name: name of the segment, edge, FSDP unit, bucket or region, or of the stage whose weights
            are updated. Devices have their own segments, which share names.
        devices: devices that take part, ascending.
        phase: the whole communication, its start, or the wait for its end.
        half: the half of the microbatch for which this is done, 0 or 1, if microbatches run in
            halves (``program.duplex``); None if it is done once for the whole microbatch. In a
            pair (``program.pairs``) the action for which it is done.
        microbatch: the only microbatch for which a stage's block does this; None for all.
        version: version of the stage's weights that a segment reads or an update makes. Version 0
            exists when the step begins.
        keeps: number of versions that exist after an update, including the new one.
        stays: whether this is a move of a value that all its readers hold already.
        reads, writes: the values that it needs, and those that it makes or adds to.
        frees: those of both that nothing reads afterwards, in the same order.
    """

    kind: Verb
    name: str
    devices: tuple[Device, ...]
    phase: Phase = Phase.WHOLE
    microbatch: int | None = None
    version: int = 0
    keeps: int = 1
    half: int | None = None
    stays: bool = False
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()

    @property
    def flight(self) -> Value:
        """The value that a start makes and its wait takes."""
        return _flight(self.kind, self.name)

    def started(self) -> StepInstruction:
        """The start of a whole communication."""
        return replace(self, phase=Phase.START, writes=(self.flight,))

    def waited(self) -> StepInstruction:
        """The wait for a whole communication that was started."""
        flight = (self.flight,)
        return replace(self, phase=Phase.WAIT, reads=flight, frees=flight)

    def is_start_of(self, wait: StepInstruction) -> bool:
        """Whether this starts the communication that the other one waits for."""
        is_start = self.phase is Phase.START and self.devices == wait.devices
        return is_start and self.half == wait.half and self.flight == wait.flight

    def whole(self, wait: StepInstruction) -> StepInstruction:
        """The whole communication of a start and its wait."""
        return replace(self, phase=Phase.WHOLE, writes=wait.writes)

    def is_for(self, microbatch: int) -> bool:
        """Whether a stage's block does this for a microbatch."""
        return self.microbatch is None or self.microbatch == microbatch

    # --- values ---------------------------------------------------------------------------------

    @property
    def own(self) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The values that it reads and writes because of its kind, phase and name."""
        return _own_values(self.kind, self.phase, self.name)

    @property
    def given_reads(self) -> tuple[Value, ...]:
        """The values that it reads, without those that follow from the kind and the name."""
        own = self.own[0]
        return tuple(value for value in self.reads if value not in own)

    @property
    def given_writes(self) -> tuple[Value, ...]:
        """The same for values that it writes."""
        own = self.own[1]
        return tuple(value for value in self.writes if value not in own)

    def with_values(self, reads: tuple[Value, ...], writes: tuple[Value, ...]) -> StepInstruction:
        """The instruction with these values, those that follow from it, and what it frees."""
        own_reads, own_writes = self.own
        reads = own_reads if self.phase is Phase.WAIT else (*reads, *own_reads)
        writes = own_writes if self.phase is Phase.START else (*writes, *own_writes)
        roles = OWN[self.kind].frees
        frees = reads if self.phase is Phase.WAIT else tuple(v for v in reads if v.role in roles)
        return self._given(reads, writes, frees)

    def freeing(self, frees: tuple[Value, ...]) -> StepInstruction:
        """The instruction that frees these of its values."""
        return self if frees == self.frees else self._given(self.reads, self.writes, frees)

    def _given(self, *values: tuple[Value, ...]) -> StepInstruction:
        # In place of ``replace``, which takes three times as long for the many instructions of a
        # step.
        return StepInstruction(
            self.kind, self.name, self.devices, self.phase, self.microbatch, self.version,
            self.keeps, self.half, self.stays, *values,
        )  # fmt: skip

    # --- text -----------------------------------------------------------------------------------

    @property
    def short(self) -> str:
        """The text without values."""
        words = [self.phase, self.kind, self.name, "on", ",".join(map(str, self.devices))]
        words += ["stays"] if self.stays else []
        words += [] if self.half is None else ["half", str(self.half)]
        if self.microbatch is not None:
            words += ["at", str(self.microbatch)]
        words += [f"v{self.version}"] if self.version else []
        words += ["keeps", str(self.keeps)] if self.keeps > 1 else []
        return " ".join(word for word in words if word)

    def __str__(self) -> str:
        given = self.given_reads, self.given_writes
        reads, writes = (", ".join(self._words(values)) for values in given)
        if not (reads or writes):
            return self.short
        return (
            f"{self.short}: {reads}{' ' if reads and writes else ''}{'-> ' if writes else ''}"
            f"{writes}"
        )

    def _words(self, values: Iterable[Value]) -> Iterator[str]:
        """Some of the values as texts, with those of their devices that free them."""
        freed = {value.key: value for value in self.frees}
        for value in values:
            gone = freed.get(value.key)
            yield f"~{value}" if gone == value else str(value)
            if gone is not None and gone != value:
                yield f"~{gone}"

    @classmethod
    def parse(cls, text: str) -> StepInstruction:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form.
        """
        base, _, operands = text.strip().partition(": ")
        found = _TEXT.fullmatch(base)
        if found is None:
            raise PlanError(
                f"cannot read the instruction {text.strip()[:80]!r}: it is a kind, a name and the "
                f"devices, such as 'F stage0_segment1 on 0'; kinds are {', '.join(Verb)}."
            )
        phase = Phase(found[1] or "")
        devices = tuple(map(int, found[4].split(",")))
        half, microbatch = (None if text is None else int(text) for text in found.group(6, 7))
        versions, stays = (int(found[8] or 0), int(found[9] or 1)), bool(found[5])
        bare = cls(Verb(found[2]), found[3], devices, phase, microbatch, *versions, half, stays)
        sides = [_given(side) for side in _ARROW.split(operands, maxsplit=1)]
        (reads, gone), (writes, dead) = (*sides, ((), ()))[:2]
        own_reads, own_writes = bare.own
        freed = () if bare.kind is Verb.RECOMPUTE else own_reads
        return replace(
            bare,
            reads=(*reads, *own_reads),
            writes=(*writes, *own_writes),
            frees=(*gone, *freed, *dead),
        )


_ARROW = re.compile(r"(?:^| )-> ")


def _given(side: str) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The values on one side of an instruction's text, and those of them that it frees."""
    found: list[Value] = []
    freed: list[Value] = []
    for word in side.split(", ") if side else ():
        value = Value.parse(word.removeprefix("~"))
        freed += [value] if word.startswith("~") else []
        if not any(value.is_same(other) for other in found):
            found.append(value)
    return tuple(found), tuple(freed)


@lru_cache(maxsize=1 << 14)
def _own_values(kind: Verb, phase: Phase, name: str) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The values of instructions that follow from their kind, phase and name."""
    own = OWN[kind]
    reads, writes = (
        tuple(Value(role, name) for role in roles) for roles in (own.reads, own.writes)
    )
    match phase:
        case Phase.START:
            return reads, (_flight(kind, name),)
        case Phase.WAIT:
            return (_flight(kind, name),), writes
    return reads, writes


def _flight(kind: Verb, name: str) -> Value:
    return Value(Role.FLIGHT, f"{kind} {name}")


Block = tuple[StepInstruction, ...]
"""Instructions of all devices, in an order that each of them keeps."""
