"""Step program: one training step written out, as a value that can be printed, read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from superscaler_core.plan import Device
from superscaler_core.program.check import check
from superscaler_core.program.event import Event, OverlappedPair, Pair, pair_of
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.text import fields_of, text_of
from superscaler_core.program.together import together
from superscaler_core.schedules import Action, ActionKind


@dataclass(frozen=True)
class StepProgram:
    """All instructions of a step on all devices, in one order that every device keeps.

    The instructions of a stage are written once for all microbatches, as its *block*; ``events``
    say when a stage runs its block for which microbatch. Weights outside FSDP units are fetched
    before all events, and their gradients are reduced after them. In the program of an asynchronous
    pipeline a stage has a block of its updates (U), and events have the version of weights that
    they read or make: ``0F4 v1``, or ``2F4 v3 stage0 v1`` of a stage that borrows weights of stage
    0.

    What devices do alone, one behind the other, is one instruction (``together``), so equal
    programs are equal values.

    Law (tests/superscaler_core/program/test_step_program.py): ``StepProgram.parse(str(p)) == p``,
    and ``check`` accepts what ``materialize`` makes.

    Attributes:
        name: name of the model.
        devices: ascending.
        blocks: for each stage and kind of run, the instructions of all devices.
        events: in order.
        begin, end: the instructions before all events, and after them.
        num_microbatches: number of microbatches in the step, each of the captured batch.
        num_routes: number of copies of the model, one for each route of microbatches; the stages of
            a copy are numbered after those of the copy before.
        num_halves: 2 if an action runs two microbatches of the step: the action of ``0F3`` then
            runs microbatches 6 and 7, the halves 0 and 1 of its instructions. Otherwise 1.
        versions: the version of its stage's weights that an action reads, or makes (U); 0 for
            actions that are not in it. An instruction that names a version itself has that one.
        borrowed: for an action and another stage, the version of that stage's weights which the
            action reads too.
        pairs: for each kind of pair among the events, the instructions of both actions woven
            (``program.pairs``); the half of an instruction is the action that it belongs to.
    """

    name: str
    devices: tuple[Device, ...]
    blocks: Mapping[tuple[int, ActionKind], Block]
    events: tuple[Event, ...]
    begin: Block = ()
    end: Block = ()
    num_microbatches: int = 1
    num_routes: int = 1
    num_halves: int = 1
    versions: Mapping[Action, int] = field(default_factory=dict)
    borrowed: Mapping[tuple[Action, int], int] = field(default_factory=dict)
    pairs: Mapping[Pair, Block] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            object.__setattr__(self, name, together(getattr(self, name)))
        for name in ("blocks", "pairs"):
            blocks = {key: together(block) for key, block in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(blocks))
        versions = {action: version for action, version in self.versions.items() if version}
        object.__setattr__(self, "versions", MappingProxyType(versions))
        object.__setattr__(self, "borrowed", MappingProxyType(dict(self.borrowed)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Python cannot pickle read-only mappings.
        values = (getattr(self, field.name) for field in fields(self))
        return StepProgram, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def instructions(self, device: Device) -> Iterator[tuple[StepInstruction, int]]:
        """The instructions of one device, without P2P sends; each with its microbatch.

        The microbatch is -1 before and after all stages.
        """
        yield from ((i, -1) for i in self.begin if device in i.devices)
        for event in self.events:
            if isinstance(event, Action):
                for instruction in self.on(device, event.stage, event.kind):
                    if instruction.is_for(event.microbatch):
                        yield instruction, self._microbatch(event, instruction)
            elif isinstance(event, OverlappedPair):
                for instruction, action in self.run_as_one(event):
                    if device in instruction.devices:
                        yield instruction, action.microbatch
        yield from ((i, -1) for i in self.end if device in i.devices)

    @property
    def all_blocks(self) -> Iterator[Block]:
        """All sequences of instructions: before all events, of stages, of pairs, and after them."""
        yield from (self.begin, *self.blocks.values(), *self.pairs.values(), self.end)

    def run_as_one(self, event: OverlappedPair) -> Iterator[tuple[StepInstruction, Action]]:
        """The instructions of all devices in a pair, each with its action."""
        for instruction in self.pairs[pair_of(event)]:
            action = event.second if instruction.half else event.first
            if instruction.is_for(action.microbatch):
                yield instruction, action

    def everywhere(self) -> Iterator[tuple[StepInstruction, int, int]]:
        """The instructions of all devices; each with its stage and microbatch.

        A copy of a stage on another route has the number of the original. Before and after all
        stages both numbers are -1.
        """
        yield from ((i, -1, -1) for i in self.begin)
        for event in self.events:
            if isinstance(event, Action):
                version = self.versions.get(event, 0)
                for instruction in self.blocks[event.stage, event.kind]:
                    if instruction.is_for(event.microbatch):
                        read = instruction.version or version
                        made = replace(instruction, version=read) if version else instruction
                        microbatch = self._microbatch(event, instruction)
                        yield made, event.stage % self._route_size, microbatch
            elif isinstance(event, OverlappedPair):
                for instruction, action in self.run_as_one(event):
                    yield instruction, action.stage % self._route_size, action.microbatch
        yield from ((i, -1, -1) for i in self.end)

    def _microbatch(self, event: Action, instruction: StepInstruction) -> int:
        """The microbatch for which an action does an instruction."""
        return event.microbatch * self.num_halves + (instruction.half or 0)

    @cached_property
    def _route_size(self) -> int:
        """Number of stages of a route."""
        return (max((stage for stage, _ in self.blocks), default=0) + 1) // self.num_routes

    def on(self, device: Device, stage: int, run: ActionKind) -> Sequence[StepInstruction]:
        """The instructions of one device in a block."""
        return self._mine.get((device, stage, run), ())

    @cached_property
    def _mine(self) -> Mapping[tuple[Device, int, ActionKind], list[StepInstruction]]:
        found: dict[tuple[Device, int, ActionKind], list[StepInstruction]] = {}
        for (stage, run), block in self.blocks.items():
            for instruction in block:
                for device in instruction.devices:
                    found.setdefault((device, stage, run), []).append(instruction)
        return found

    def __str__(self) -> str:
        return text_of(self)

    @classmethod
    def parse(cls, text: str) -> StepProgram:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: a line has another form; the text names it.
        """
        return cls(**fields_of(text))

    def check(self) -> None:
        """Refuse a program that cannot run (``program.check``).

        Raises:
            PlanError: names the instruction, the device, the microbatch and the value.
        """
        check(self)
