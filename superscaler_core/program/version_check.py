"""Version check: which versions of weights exist when an asynchronous pipeline reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from superscaler_core.errors import PlanError
from superscaler_core.program.event import Event, actions_in, weights_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role
from superscaler_core.program.verb import COMPUTING, Verb
from superscaler_core.schedules import Action, ActionKind

if TYPE_CHECKING:
    from superscaler_core.program.step_program import StepProgram


def check_versions(program: StepProgram) -> None:
    """Check that every version of weights exists when it is read, and is the right one.

    That an update has gradients, and that all gradients get an update, follows from the values.

    Raises:
        PlanError: names the instruction and the version.
    """
    if _has_versions(program):
        update_groups(program)
        versions = _Versions()
        for instruction, stage, microbatch in program.everywhere():
            if instruction.kind in COMPUTING:
                versions.compute(instruction, stage, microbatch)
            elif instruction.kind is Verb.UPDATE:
                versions.update(instruction)


def _has_versions(program: StepProgram) -> bool:
    """Whether a step updates weights before its end, or names a version that this would make."""
    inside = (i for block in program.blocks.values() for i in block)
    is_named = any(i.version or i.kind is Verb.UPDATE for i in inside)
    updates = (i for i in (*program.begin, *program.end) if i.kind is Verb.UPDATE)
    return is_named or bool(program.versions) or any(i.version != 1 for i in updates)


class _Versions:
    """The versions of the weights of all stages."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, ...]] = {}
        self._read: dict[tuple[int, int], int] = {}

    def compute(self, instruction: StepInstruction, stage: int, microbatch: int) -> None:
        """Check that a segment reads a version that exists, the same for a microbatch."""
        name, version = weights_of(stage), instruction.version
        kept = self._kept.get(name, (0,))
        first = self._read.setdefault((stage, microbatch), version)
        if version != first and not (first not in kept and version == kept[-1]):
            raise PlanError(
                f"{instruction.short}: stage {stage} has read version {first} for microbatch "
                f"{microbatch}, and reads version {version} now."
            )
        if version not in kept:
            raise PlanError(
                f"{instruction.short}: version {version} of the weights of {name} is not kept; "
                f"there is {', '.join(map(str, kept))}."
            )

    def update(self, instruction: StepInstruction) -> None:
        """Check that an update makes the next version, and record it."""
        name, kept = instruction.name, self._kept.get(instruction.name, (0,))
        if instruction.version != kept[-1] + 1:
            raise PlanError(
                f"{instruction.short}: the next version of these weights is {kept[-1] + 1}."
            )
        self._kept[name] = (*kept, instruction.version)[-instruction.keeps :]


def update_groups(program: StepProgram) -> Mapping[Action, frozenset[int]]:
    """The microbatches whose gradients each update between microbatches applies.

    Raises:
        PlanError: an update comes before its last backward, or after the first one of the next.
    """
    adding = {
        key for key, block in program.blocks.items()
        if any(value.role is Role.SUM for i in block for value in i.writes)
    }  # fmt: skip
    runs = [run for event in program.events for run in actions_in(event)]
    num_updates = Counter(run.stage for run in runs if run.kind is ActionKind.UPDATE)
    done: dict[int, list[int]] = {}
    found: dict[Action, frozenset[int]] = {}
    for run in runs if num_updates else ():
        mine = done.setdefault(run.stage, [])
        if (run.stage, run.kind) in adding:
            mine.append(run.microbatch)
        elif run.kind is ActionKind.UPDATE and mine:
            size = program.num_microbatches // num_updates[run.stage]
            if len(mine) != run.microbatch + 1:
                raise PlanError(
                    f"{run}: {len(mine)} microbatches of stage {run.stage} have had their backward "
                    f"before it; it comes after {run.microbatch + 1}, and applies the last {size}."
                )
            found[run] = frozenset(mine[-size:])
    return found


def check_borrowed(program: StepProgram) -> None:
    """Check that borrowed versions exist when they are read, and that owners update last.

    Raises:
        PlanError: names the action and the stage that owns the weights.
    """
    borrowed, num_kept = program.borrowed, _num_kept(program)
    borrowers: dict[int, set[int]] = {}
    for action, owner in borrowed:
        borrowers.setdefault(owner, set()).add(action.stage)
    made: Counter[int] = Counter()
    seen: set[Event] = set()
    for event in program.events:
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
                reads = "names no version" if version is None else f"reads version {version}"
                raise PlanError(
                    f"{event}: it {reads} of the weights of stage {owner}, and "
                    f"there is {', '.join(map(str, kept))}."
                )
            first = borrowed.get((replace(event, kind=ActionKind.FORWARD), owner))
            if version != first and len(kept) > 1:
                raise PlanError(
                    f"{event}: it reads version {version} of the weights of stage {owner}, and its "
                    f"forward has read version {first}."
                )


def _num_kept(program: StepProgram) -> Mapping[int, int]:
    """For each stage that is updated between microbatches, how many versions it keeps."""
    return {
        stage: instruction.keeps
        for (stage, run), block in program.blocks.items()
        for instruction in block
        if run is ActionKind.UPDATE and instruction.kind is Verb.UPDATE
    }
