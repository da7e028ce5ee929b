"""Bound: whether a step program is a program of a plan, so that the plan's segments can run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.event import P2PSend
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.split_backward import in_halves
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.terms import check_terms
from superscaler_core.program.value import Value
from superscaler_core.program.verb import ALONE, OF_WEIGHTS, Phase, Verb
from superscaler_core.program.version_check import update_groups
from superscaler_core.schedules import ActionKind

Values = tuple[Value, ...]
Key = tuple[int | None, Verb, str, tuple[Device, ...], bool]
"""A stage, a kind, a name, devices, and whether nothing moves.

The stage is None for communication of the step, which may be in a stage's block or around all.
"""
Known = dict[Key, list[tuple[Values, Values]]]
"""What instructions read and write, by their keys."""


def check_bound(program: StepProgram, own: StepProgram) -> None:
    """Refuse a program that names what a plan does not have, or uses it with other values.

    Args:
        program: a program, for example one that was read from a text, or rewritten.
        own: the plan's own program.

    Raises:
        PlanError: names the instruction, and what the plan has.
    """
    for name, noun in _FIELDS.items():
        mine, wanted = getattr(program, name), getattr(own, name)
        if mine != wanted:
            raise PlanError(f"the step program's {noun}: {mine!r}; the plan's: {wanted!r}.")
    known = _known(own)
    for stage, instruction in _with_stages(program):
        _check(stage, instruction, known)
    _check_devices(program, own)
    check_terms(program, own)
    groups = update_groups(own)
    for update, microbatches in update_groups(program).items():
        if microbatches != groups.get(update):
            raise PlanError(
                f"{update}: it applies gradients of microbatches {sorted(microbatches)}; in the "
                f"plan it applies those of {sorted(groups.get(update, ()))}."
            )
    sent = {(e.name, e.is_back) for e in own.events if isinstance(e, P2PSend)}
    for event in program.events:
        if isinstance(event, P2PSend) and (event.name, event.is_back) not in sent:
            raise PlanError(f"{event}: the plan has no such transfer.")


_FIELDS = {
    "name": "model",
    "devices": "devices",
    "num_halves": "halves of a microbatch (duplex is an overlap of the plan)",
    "num_microbatches": "number of microbatches",
    "num_routes": "number of routes",
}
"""What two programs agree on, for a person."""


def _check_devices(program: StepProgram, own: StepProgram) -> None:
    """What stands in a stage's block is done by the devices that run the stage, and no others."""
    running = _running(own)
    for (stage, run), block in program.blocks.items():
        mine = running.get((stage, run is ActionKind.UPDATE), frozenset())
        for instruction in block:
            idle = sorted(set(instruction.devices) - mine)
            if idle:
                raise PlanError(
                    f"{instruction.short}: device {idle[0]} does not run stage {stage}, so it does "
                    f"nothing in its block {run}; devices {sorted(mine)} do."
                )


def _running(own: StepProgram) -> Mapping[tuple[int, bool], frozenset[Device]]:
    """For each stage, and for whether it is updated, the devices that do anything in its blocks."""
    found: dict[tuple[int, bool], frozenset[Device]] = {}
    for (stage, run), block in own.blocks.items():
        key = stage, run is ActionKind.UPDATE
        found[key] = found.get(key, frozenset()).union(*(i.devices for i in block))
    return found


def _known(own: StepProgram) -> Known:
    starts: dict[Key, Values] = {}
    found: Known = {}
    for stage, instruction in _with_halves(own):
        reads, writes = instruction.given_reads, instruction.given_writes
        for key in _keys(stage, instruction):
            if instruction.phase is Phase.START:
                starts[key] = reads
            else:
                found.setdefault(key, []).append(
                    (starts.get(key, ()) if instruction.phase is Phase.WAIT else reads, writes)
                )
    return found


def _with_stages(program: StepProgram) -> Iterator[tuple[int | None, StepInstruction]]:
    """The instructions, each with the stage in whose run it is; None around all stages."""
    yield from ((None, i) for i in program.begin)
    yield from ((stage, i) for (stage, _), block in program.blocks.items() for i in block)
    for pair, block in program.pairs.items():
        yield from ((pair[i.half or 0][0], i) for i in block)
    yield from ((None, i) for i in program.end)


def _keys(stage: int | None, instruction: StepInstruction) -> Iterator[Key]:
    """The keys of an instruction: one for each device, if each does it alone."""
    kind, devices = instruction.kind, instruction.devices
    at = None if kind in _OF_STEP else stage
    for mine in zip(devices) if kind in ALONE else [devices]:
        yield at, kind, instruction.name, mine, instruction.stays


_OF_STEP = OF_WEIGHTS | {Verb.LOSS, Verb.UPDATE}


def _with_halves(own: StepProgram) -> Iterator[tuple[int | None, StepInstruction]]:
    """The plan's instructions, with both halves of its backwards."""
    for stage, instruction in _with_stages(own):
        yield stage, instruction
        if instruction.kind is Verb.BACKWARD:
            yield from ((stage, half) for half in in_halves(instruction))


def _check(stage: int | None, instruction: StepInstruction, known: Known) -> None:
    for key in _keys(stage, instruction):
        _check_values(instruction, known.get(key))


def _check_values(
    instruction: StepInstruction, variants: Sequence[tuple[Values, Values]] | None
) -> None:
    if variants is None:
        raise PlanError(f"{instruction.short}: the plan has no such instruction.")
    reads, writes = instruction.given_reads, instruction.given_writes
    is_start, is_wait = (instruction.phase is phase for phase in (Phase.START, Phase.WAIT))
    # A start writes only its flight, and a wait reads only that.
    pairs = [
        ((mine if is_wait else reads, made if is_start else writes), (mine, made))
        for mine, made in variants
    ]
    if all(here != there for here, there in pairs):
        words = min((_differing(here, there) for here, there in pairs), key=len)
        raise PlanError(f"{instruction.short}: {words}.")


def _differing(mine: tuple[Values, Values], wanted: tuple[Values, Values]) -> str:
    """What an instruction reads and writes in place of what it should."""
    found = []
    for verb, here, there in zip(("read", "write"), mine, wanted, strict=True):
        more, less = (
            ", ".join(str(value) for value in side if value not in other)
            for side, other in ((here, there), (there, here))
        )
        found += [f"it {verb}s {more}"] if more else []
        found += [f"it does not {verb} {less}"] if less else []
        if here != there and not (more or less):
            found.append(f"it {verb}s in another order than {', '.join(map(str, there))}")
    return f"unlike in the plan, {' and '.join(found)}"
