"""Form: what the parts of a step program have to agree on, whatever the order of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.event import OverlappedPair, actions_in, pair_of, pair_text
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.value import IN_BLOCK, Role, Value
from superscaler_core.program.verb import COMPUTING, IN_PHASES, MOVES, OF_WEIGHTS, OWN, Phase, Verb
from superscaler_core.schedules import Action, ActionKind

if TYPE_CHECKING:
    from superscaler_core.program.step_program import StepProgram


_AROUND = OF_WEIGHTS | {Verb.LOSS, Verb.UPDATE}
"""Kinds of instructions that may stand before all stages and after them."""


def check_form(program: StepProgram) -> None:
    """Refuse a program whose parts do not agree.

    Raises:
        PlanError: an event has no block, or is there twice; a microbatch does not run all stages of
            one route; an instruction has other devices than its values, other values than follow
            from its kind, phase and name, or a half or a microbatch without need; the backward of a
            segment is for other values than its forward; a pair differs from the blocks of its
            actions.
    """
    _check_events(program)
    everyone = frozenset(program.devices)
    for instruction in (i for block in program.all_blocks for i in block):
        _check_devices(instruction, everyone)
        _check_values(instruction)
    for instruction in (*program.begin, *program.end):
        if instruction.kind not in _AROUND:
            raise PlanError(f"{instruction.short}: it stands in a stage's block, not around all.")
        _check_half(instruction, 1)
    for instruction in (i for block in program.blocks.values() for i in block):
        _check_half(instruction, program.num_halves)
        if instruction.kind is Verb.LOSS:
            raise PlanError(f"{instruction.short}: it stands around all stages, not in a block.")
    _check_segments(program)
    _check_pairs(program)
    _check_states(program)


# --- events -------------------------------------------------------------------------------------


def _check_events(program: StepProgram) -> None:
    counts = Counter(run for event in program.events for run in actions_in(event))
    for action, count in counts.items():
        if (action.stage, action.kind) not in program.blocks:
            raise PlanError(f"{action}: stage {action.stage} has no block {action.kind}.")
        if count > 1:
            raise PlanError(f"{action} is run {count} times; an action is run once.")
    forwards = [action for action in counts if action.kind is ActionKind.FORWARD]
    _check_microbatches(program, forwards)
    _check_routes(program, forwards)


def _check_microbatches(program: StepProgram, forwards: Iterable[Action]) -> None:
    ran = {action.microbatch for action in forwards}
    num = program.num_microbatches // program.num_halves
    if ran != set(range(num)):
        raise PlanError(
            f"a step of {num} microbatches runs 0 to {num - 1}; there are forwards of "
            f"{', '.join(map(str, sorted(ran))) or 'none'}."
        )


def _check_routes(program: StepProgram, forwards: Iterable[Action]) -> None:
    """Every microbatch runs all stages of one route."""
    stages = {stage for stage, kind in program.blocks if kind is not ActionKind.UPDATE}
    size, rest = divmod(max(stages, default=0) + 1, program.num_routes)
    if rest:
        raise PlanError(f"{len(stages)} stages are not {program.num_routes} routes of equal size.")
    ran: dict[int, set[int]] = {}
    for action in forwards:
        ran.setdefault(action.microbatch, set()).add(action.stage)
    for microbatch, mine in ran.items():
        routes = sorted({stage // size for stage in mine})
        if len(routes) > 1:
            raise PlanError(
                f"microbatch {microbatch} is run at stages {sorted(mine)}, of routes {routes}: it "
                f"goes one of {program.num_routes} routes of {size} stages."
            )
        for stage in sorted(stages - mine):
            if stage // size == routes[0]:
                raise PlanError(f"no F of microbatch {microbatch} at stage {stage}.")


# --- instructions -------------------------------------------------------------------------------


def _check_devices(instruction: StepInstruction, everyone: frozenset[Device]) -> None:
    mine, operands = instruction.devices, _operands(instruction)
    for devices in (mine, *(value.devices for value in operands)):
        if any(one >= then for one, then in pairwise(devices)):
            raise PlanError(f"{instruction.short}: it names {devices}; devices are ascending.")
    named = {d for value in operands if value.devices for d in value.devices}
    if not (named.issubset(mine) and everyone.issuperset(mine)):
        strange = sorted((named - set(mine)) | (set(mine) - everyone))
        raise PlanError(
            f"{instruction.short}: device {strange[0]} does not take part in it, or in the program."
        )
    if instruction.kind is Verb.LOSS and everyone != set(mine):
        raise PlanError(f"{instruction.short}: every device gets the loss: {sorted(everyone)}.")
    # A reader without a backward takes part in the move of a gradient, and adds nothing to it.
    if instruction.kind is Verb.MOVE and instruction.phase is Phase.WHOLE:
        idle = set(mine).difference(d for value in operands for d in value.devices or mine)
        if idle:
            raise PlanError(
                f"{instruction.short}: device {min(idle)} neither writes nor reads what moves."
            )


def _check_values(instruction: StepInstruction) -> None:
    """An instruction names its values once, and in the order that its text says.

    What only it makes or takes comes last, and follows from its kind, phase and name.
    """
    if instruction.phase is not Phase.WHOLE and instruction.kind not in IN_PHASES:
        raise PlanError(f"{instruction.short}: only communication has a start and a wait.")
    if instruction.microbatch is not None and instruction.kind not in OF_WEIGHTS:
        raise PlanError(f"{instruction.short}: only weights are moved for one microbatch alone.")
    if instruction.version and instruction.kind not in COMPUTING | {Verb.UPDATE}:
        raise PlanError(f"{instruction.short}: only segments and updates have a version.")
    if instruction.keeps > 1 and instruction.kind is not Verb.UPDATE:
        raise PlanError(f"{instruction.short}: only updates keep versions.")
    reads, writes = instruction.reads, instruction.writes
    places = {value.key: place for place, value in enumerate((*reads, *writes))}
    if len(places) < len(reads) + len(writes) and not any(v.role is Role.STATE for v in writes):
        raise PlanError(f"{instruction}: it names a value twice.")
    _check_own(instruction)
    freed = [places.get(value.key, -1) for value in instruction.frees]
    if any(one >= then for one, then in pairwise([-1, *freed])):
        raise PlanError(f"{instruction}: it frees values that it uses, each once, in their order.")


def _check_own(instruction: StepInstruction) -> None:
    """The values that only this instruction makes or takes, and what it frees of those it reads."""
    (own_reads, own_writes), phase = instruction.own, instruction.phase
    reads, writes = instruction.reads, instruction.writes
    given = len(reads) - len(own_reads), len(writes) - len(own_writes)
    frees = _PASSED[instruction.kind]
    passed = [value for value in instruction.frees if value.role not in IN_BLOCK]
    if (
        min(given) < 0
        or (reads[given[0] :], writes[given[1] :]) != (own_reads, own_writes)
        or (phase is Phase.WAIT and given[0])
        or (phase is Phase.START and given[1])
        or passed != [value for value in reads if value.role in frees]
    ):
        wanted = instruction.with_values(instruction.given_reads, instruction.given_writes)
        raise PlanError(
            f"{instruction.short}: from its kind and name follows that it reads "
            f"{_listed(wanted.reads)}, writes {_listed(wanted.writes)} and frees "
            f"{_listed(wanted.frees)} besides values of the run."
        )


def _listed(values: Iterable[Value]) -> str:
    return ", ".join(map(str, values)) or "nothing"


_PASSED = {kind: own.frees | {Role.FLIGHT} for kind, own in OWN.items()}
"""Roles of values that instructions of a kind free, besides those that live in a run."""


def _operands(instruction: StepInstruction) -> tuple[Value, ...]:
    return (*instruction.reads, *instruction.writes, *instruction.frees)


def _check_half(instruction: StepInstruction, num_halves: int) -> None:
    in_halves = num_halves > 1 and instruction.kind not in OF_WEIGHTS
    if in_halves != (instruction.half is not None):
        wanted = "needs a half" if in_halves else "has a half, and is done once"
        raise PlanError(f"{instruction.short}: it {wanted} in this program.")


# --- segments -----------------------------------------------------------------------------------

_RUNS = frozenset({Verb.FORWARD, Verb.COMPUTE, Verb.HOLD})
_BACKWARDS = frozenset({Verb.BACKWARD, Verb.BACKWARD_INPUTS, Verb.BACKWARD_WEIGHTS})


def _check_segments(program: StepProgram) -> None:
    """All runs of a segment read the same values, and its backward is for some of them.

    A block runs a segment once, so that each term of a sum is added once.
    """
    for block in program.all_blocks:
        _check_once(block)
    read: dict[tuple[str, Device], tuple[Value, ...]] = {}
    for instruction in (i for block in program.blocks.values() for i in block):
        for device in instruction.devices if instruction.kind in _RUNS else ():
            known = read.setdefault((instruction.name, device), instruction.reads)
            if known is not instruction.reads and known != instruction.reads:
                raise PlanError(
                    f"{instruction.short}: another run of this segment reads "
                    f"{', '.join(map(str, known))}."
                )
    for instruction in (i for block in program.blocks.values() for i in block):
        if instruction.kind in _BACKWARDS:
            args = (read.get((instruction.name, device)) for device in instruction.devices)
            for mine in {id(each): each for each in args if each is not None}.values():
                _check_backward(instruction, mine)


def _check_once(block: Block) -> None:
    done: set[tuple[str, Device, int | None]] = set()
    for instruction in block:
        for device in instruction.devices if instruction.kind in _RUNS else ():
            run = instruction.name, device, instruction.half
            if run in done:
                raise PlanError(
                    f"{instruction.short}: device {device} has run this segment in the block; its "
                    "results would be added to sums again."
                )
            done.add(run)


def _check_backward(backward: StepInstruction, read: Iterable[Value]) -> None:
    """A backward adds, under its own name, to gradients; those of weights are for what is read."""
    weights = {value.name for value in read if value.role in (Role.COPY, Role.WEIGHT)}
    end = f" by {backward.name}"
    for value in backward.writes:
        is_sum, is_grad = value.role is Role.SUM, value.role is Role.GRAD
        if (is_sum and value.name not in weights) or (is_grad and not value.name.endswith(end)):
            raise PlanError(
                f"{backward.short}: its forward does not read what {value} is a gradient of."
            )


# --- pairs --------------------------------------------------------------------------------------


def _check_pairs(program: StepProgram) -> None:
    for pair, block in program.pairs.items():
        for half, (stage, kind) in enumerate(pair):
            mine = _done(i for i in block if i.half == half)
            wanted = _done(program.blocks.get((stage, kind), ()))
            if mine != wanted:
                raise PlanError(
                    f"{pair_text(pair)}: {_first_other(mine, wanted)}; its instructions of stage "
                    f"{stage} are those of the block 'stage {stage} {kind}', in the same order."
                )
    for event in program.events:
        if isinstance(event, OverlappedPair) and pair_of(event) not in program.pairs:
            raise PlanError(f"{event}: there is no block of such pairs.")


def _first_other(mine: Sequence[_Done], wanted: Sequence[_Done]) -> str:
    """The first place where two blocks differ, for a person."""
    for one, other in zip_longest(mine, wanted):
        if one != other:
            there, here = ("nothing" if x is None else f"'{x[0]} {x[1]}'" for x in (other, one))
            return f"it has {here} where {there} comes next"
    raise AssertionError("they differ")


_Done = tuple[object, ...]


def _done(block: Iterable[StepInstruction]) -> list[_Done]:
    """What a block does, in order; a move stands where it is waited for."""
    ended = (i for i in block if i.kind not in MOVES or i.phase is not Phase.START)
    return [
        (i.kind, i.name, i.devices, "" if i.kind in MOVES else i.phase, i.microbatch) for i in ended
    ]


# --- buffers ------------------------------------------------------------------------------------


def _check_states(program: StepProgram) -> None:
    """Microbatches replace a buffer in their order: each reads what the one before has left."""
    replacing = {
        key: block
        for key, block in program.blocks.items()
        if any(v.role is Role.STATE for i in block if i.kind in _RUNS for v in i.writes)
    }
    last: dict[int, tuple[int, int]] = {}
    for action in (run for event in program.events for run in actions_in(event)):
        if (action.stage, action.kind) in replacing:
            now = (
                action.microbatch,
                action.recycling_pass if action.kind is ActionKind.RECYCLE else 1 << 30,
            )
            if now < last.get(action.stage, now):
                raise PlanError(
                    f"{action}: stage {action.stage} replaces buffers, so its microbatches run in "
                    f"order; microbatch {last[action.stage][0]} has run before."
                )
            last[action.stage] = now
    for block in replacing.values():
        _check_states_of_halves(block)


def _check_states_of_halves(block: Block) -> None:
    """The second half of a microbatch reads a buffer after the first half has replaced it."""
    replaced: set[tuple[Device, str]] = set()
    halved = any(i.half == 1 for i in block)
    for instruction in block if halved else ():
        devices = instruction.devices
        for value in instruction.reads if instruction.half == 1 else ():
            done = value.role is not Role.STATE or replaced.issuperset(_on(value, devices))
            if not done:
                raise PlanError(
                    f"{instruction.short}: the first half has not replaced {value} yet."
                )
        for value in instruction.writes if instruction.half == 0 else ():
            replaced |= set(_on(value, devices)) if value.role is Role.STATE else set()


def _on(value: Value, devices: tuple[Device, ...]) -> list[tuple[Device, str]]:
    """A value on each of its devices."""
    return [(device, value.key) for device in value.devices or devices]
