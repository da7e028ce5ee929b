"""Mutants: step programs with one change; the check refuses them, or they train the same weights.

A mutant has an instruction or an event less, twice, or at another place, or an instruction, an
event or the program is changed in one field.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from superscaler_core.errors import PlanError
from superscaler_core.program.event import Event, OverlappedPair, P2PSend
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import Phase, Verb
from superscaler_core.schedules import Action, ActionKind

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """A changed program.

    Attributes:
        change: the kind of change.
        what: the instruction or the event that is changed, and how.
        program: the program with the change.
    """

    change: str
    what: str
    program: StepProgram


def is_accepted(program: StepProgram) -> bool:
    """Whether the check accepts a program."""
    try:
        program.check()
    except PlanError:
        return False
    return True


def mutant(program: StepProgram, rng: random.Random) -> Mutant:
    """A random mutant of a program."""
    while True:
        is_of_events = rng.random() < 0.3
        made = (_of_events if is_of_events else _of_instructions)(program, rng)
        if made is not None and made.program != program:
            return made


# --- sequences ----------------------------------------------------------------------------------


def _removed(items: list[T], place: int, _: random.Random) -> None:
    del items[place]


def _doubled(items: list[T], place: int, _: random.Random) -> None:
    items.insert(place, items[place])


def _again(items: list[T], place: int, rng: random.Random) -> None:
    items.insert(rng.randrange(len(items) + 1), items[place])


def _moved(items: list[T], place: int, rng: random.Random) -> None:
    items.insert(rng.randrange(len(items)), items.pop(place))


def _moved_by_one(items: list[T], place: int, _: random.Random) -> None:
    items.insert(place + 1, items.pop(place))


def _offloaded(items: list[T], place: int, rng: random.Random) -> None:
    other = rng.randrange(len(items))
    items[place], items[other] = items[other], items[place]


SEQUENCES: Mapping[str, Callable[[list[Any], int, random.Random], None]] = {
    "removed": _removed,
    "doubled": _doubled,
    "done again": _again,
    "moved": _moved,
    "moved by one": _moved_by_one,
    "swapped": _offloaded,
}
"""Changes of an order, by name."""

ELSEWHERE = "moved to another block"


# --- instructions -------------------------------------------------------------------------------

Place = tuple[str, Any]
"""A field of a program, and the key of a block in it; None where the field is a block."""


def blocks_of(program: StepProgram) -> Mapping[Place, Block]:
    """All blocks of a program, by their places."""
    places: dict[Place, Block] = {("blocks", key): b for key, b in program.blocks.items()}
    places |= {("pairs", pair): block for pair, block in program.pairs.items()}
    return {("begin", None): program.begin, **places, ("end", None): program.end}


def with_block(program: StepProgram, place: Place, block: Sequence[StepInstruction]) -> StepProgram:
    """A program with another block at a place."""
    name, key = place
    new = tuple(block)
    fields: Any = {name: new if key is None else {**getattr(program, name), key: new}}
    return replace(program, **fields)


def _of_instructions(program: StepProgram, rng: random.Random) -> Mutant | None:
    blocks = blocks_of(program)
    where = [(place, n) for place, block in blocks.items() for n in range(len(block))]
    place, number = rng.choice(where)
    block = list(blocks[place])
    old = block[number]
    change = rng.choice([*SEQUENCES, ELSEWHERE, *FIELDS])
    what = f"{place}: {old}"
    if change in SEQUENCES:
        SEQUENCES[change](block, number, rng)
    elif change == ELSEWHERE:
        there = rng.choice([key for key in blocks if key != place])
        other_block = list(blocks[there])
        other_block.insert(rng.randrange(len(other_block) + 1), block.pop(number))
        program = with_block(program, there, other_block)
        what += f"  =>  {there}"
    else:
        other = rng.choice([i for one in blocks.values() for i in one])
        block[number] = FIELDS[change](old, other, rng)
        what += f"  =>  {block[number]}"
    return Mutant(f"instruction {change}", what, with_block(program, place, block))


Change = Callable[[StepInstruction, StepInstruction, random.Random], StepInstruction]


def _with(old: StepInstruction, name: str, values: Sequence[Value]) -> StepInstruction:
    fields: Any = {name: tuple(values)}
    return replace(old, **fields)


def _less(name: str) -> Change:
    def change(old: StepInstruction, _: StepInstruction, rng: random.Random) -> StepInstruction:
        values = list(getattr(old, name))
        if values:
            del values[rng.randrange(len(values))]
        return _with(old, name, values)

    return change


def _more(name: str) -> Change:
    def change(old: StepInstruction, other: StepInstruction, rng: random.Random) -> StepInstruction:
        strange = [*other.reads, *other.writes, *old.reads, *old.writes]
        values = list(getattr(old, name))
        if strange:
            values.insert(rng.randrange(len(values) + 1), rng.choice(strange))
        return _with(old, name, values)

    return change


def _in_place_of(name: str) -> Change:
    def change(old: StepInstruction, other: StepInstruction, rng: random.Random) -> StepInstruction:
        values, strange = list(getattr(old, name)), [*other.reads, *other.writes]
        if values and strange:
            values[rng.randrange(len(values))] = rng.choice(strange)
        return _with(old, name, values)

    return change


def _value(change: Callable[[Value, StepInstruction, random.Random], Value]) -> Change:
    """A change of one value wherever an instruction has it."""

    def changed(old: StepInstruction, _: StepInstruction, rng: random.Random) -> StepInstruction:
        values = [*old.reads, *old.writes]
        if not values:
            return old
        one = rng.choice(values)
        new = change(one, old, rng)
        reads, writes, frees = (
            tuple(new if value == one else value for value in side)
            for side in (old.reads, old.writes, old.frees)
        )
        return replace(old, reads=reads, writes=writes, frees=frees)

    return changed


def _on_fewer(value: Value, of: StepInstruction, rng: random.Random) -> Value:
    there = value.devices or of.devices
    return value.on(rng.sample(there, max(1, len(there) - 1)), of.devices)


def _devices(old: StepInstruction, other: StepInstruction, rng: random.Random) -> StepInstruction:
    return replace(old, devices=other.devices)


def _fewer_devices(old: StepInstruction, _: StepInstruction, rng: random.Random) -> StepInstruction:
    devices = tuple(sorted(rng.sample(old.devices, max(1, len(old.devices) - 1))))
    return replace(old, devices=devices)


def _name(old: StepInstruction, other: StepInstruction, _: random.Random) -> StepInstruction:
    return replace(old, name=other.name)


def _whole(old: StepInstruction, other: StepInstruction, _: random.Random) -> StepInstruction:
    return other


FIELDS: Mapping[str, Change] = {
    **{f"without one of its {name}": _less(name) for name in ("reads", "writes", "frees")},
    **{f"with one more of its {name}": _more(name) for name in ("reads", "writes", "frees")},
    **{f"with another of its {name}": _in_place_of(name) for name in ("reads", "writes", "frees")},
    "with another role": _value(lambda value, _, rng: replace(value, role=rng.choice(list(Role)))),
    "with a value on fewer devices": _value(_on_fewer),
    "on other devices": _devices,
    "on fewer devices": _fewer_devices,
    "of another name": _name,
    "replaced": _whole,
    "of another kind": lambda old, _, rng: replace(old, kind=rng.choice(list(Verb))),
    "of another phase": lambda old, _, rng: replace(old, phase=rng.choice(list(Phase))),
    "for a microbatch": lambda old, _, rng: replace(old, microbatch=rng.choice((None, 0, 1, 2))),
    "of another half": lambda old, _, rng: replace(old, half=rng.choice((None, 0, 1))),
    "of another version": lambda old, _, rng: replace(old, version=rng.randrange(3)),
    "that keeps more": lambda old, _, rng: replace(old, keeps=rng.choice((1, 2, 3))),
    "that stays or not": lambda old, _, rng: replace(old, stays=not old.stays),
}
"""Changes of an instruction, by name; each gets another instruction of the program, too."""


# --- events -------------------------------------------------------------------------------------


def _of_events(program: StepProgram, rng: random.Random) -> Mutant | None:
    change = rng.choice([*SEQUENCES, *SEQUENCES, *EVENTS, *PROGRAMS])
    if change in PROGRAMS:
        return Mutant(f"program {change}", "", PROGRAMS[change](program, rng))
    events = list(program.events)
    place = rng.randrange(len(events))
    what = str(events[place])
    if change in SEQUENCES:
        SEQUENCES[change](events, place, rng)
    else:
        new = EVENTS[change](events[place], rng)
        if new is None:
            return None
        events[place], what = new, f"{what}  =>  {new}"
    return Mutant(f"event {change}", what, replace(program, events=tuple(events)))


def _stage(event: Event, rng: random.Random) -> Event | None:
    return replace(event, stage=rng.randrange(4)) if isinstance(event, Action) else None


def _microbatch(event: Event, rng: random.Random) -> Event | None:
    return (
        None if isinstance(event, OverlappedPair) else replace(event, microbatch=rng.randrange(4))
    )


def _kind(event: Event, rng: random.Random) -> Event | None:
    if not isinstance(event, Action):
        return None
    kind = rng.choice([kind for kind in ActionKind if kind is not ActionKind.RECYCLE])
    return Action(kind, event.stage, event.microbatch)


def _turned(event: Event, _: random.Random) -> Event | None:
    match event:
        case P2PSend():
            return replace(event, is_back=not event.is_back)
        case OverlappedPair(first, second):
            return OverlappedPair(second, first)
    return None


EVENTS: Mapping[str, Callable[[Event, random.Random], Event | None]] = {
    "of another stage": _stage,
    "of another microbatch": _microbatch,
    "of another kind": _kind,
    "turned round": _turned,
}
"""Changes of an event, by name; None where an event has no such field."""


def _versions(program: StepProgram, rng: random.Random) -> StepProgram:
    actions = [event for event in program.events if isinstance(event, Action)]
    return replace(program, versions={**program.versions, rng.choice(actions): rng.randrange(4)})


def _borrowed(program: StepProgram, rng: random.Random) -> StepProgram:
    if not program.borrowed:
        return program
    key = rng.choice(list(program.borrowed))
    new = dict(program.borrowed)
    new[key] = rng.randrange(4)
    if rng.random() < 0.3:
        del new[key]
    return replace(program, borrowed=new)


def _number(name: str) -> Callable[[StepProgram, random.Random], StepProgram]:
    def change(program: StepProgram, rng: random.Random) -> StepProgram:
        fields: Any = {name: max(1, getattr(program, name) + rng.choice((-1, 1)))}
        return replace(program, **fields)

    return change


PROGRAMS: Mapping[str, Callable[[StepProgram, random.Random], StepProgram]] = {
    "with another version": _versions,
    "with another borrowed version": _borrowed,
    "of another number of microbatches": _number("num_microbatches"),
    "of another number of routes": _number("num_routes"),
    "of another number of halves": _number("num_halves"),
}
"""Changes of what a program says beside its instructions and events, by name."""
