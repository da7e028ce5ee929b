"""Step program: one training step written out, as a value that can be printed, read and checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.checks import check_borrowed, check_device, check_versions
from superscaler_core.program.event import Carry, Event, Woven, actions_in, parse_event, weights_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import MOVES, OF_WEIGHTS, Phase, Verb
from superscaler_core.schedules import GRADS, Action, ActionKind

_HEAD = re.compile(
    r"step of (.+) on ([0-9]+(?:,[0-9]+)*)(?: by ([1-9][0-9]*) routes)?( in halves)?"
)
_VERSIONED = re.compile(r"(.*?)(?: v([1-9][0-9]{0,8}))?((?: stage[0-9]{1,9} v[0-9]{1,9})*)")
_BORROWED = re.compile(r"stage([0-9]+) v([0-9]+)")
_BLOCK = re.compile(rf"stage ([0-9]+) ([{''.join(ActionKind)}]):")
_PAIR = re.compile(rf"pair ([0-9]+)([{''.join(ActionKind)}])&([0-9]+)([{''.join(ActionKind)}]):")


Block = tuple[StepInstruction, ...]
"""Instructions of all devices, in an order that each of them keeps."""

Pair = tuple[tuple[int, ActionKind], tuple[int, ActionKind]]
"""The stages and kinds of two actions that run as one."""


@dataclass(frozen=True)
class StepProgram:
    """All instructions of a step on all devices, in one order that every device keeps.

    The instructions of a stage are written once for all microbatches, as its *block*; ``events``
    say when a stage runs its block for which microbatch. Weights outside windows are fetched before
    all events, and their gradients are reduced after them. In the program of an asynchronous
    pipeline a stage has a block of its updates (U), and events have the version of weights that
    they read or make: ``0F4 v1``, or ``2F4 v3 stage0 v1`` of a stage that borrows weights of stage
    0.

    Law (tests/superscaler_core/program/test_step_program.py): ``StepProgram.parse(str(p)) == p``,
    and ``check`` accepts what ``materialize`` makes.

    Attributes:
        name: name of the model.
        devices: ascending.
        blocks: for each stage and kind of run, the instructions of all devices.
        events: in order.
        begin, end: the instructions before all events, and after them.
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
    num_routes: int = 1
    num_halves: int = 1
    versions: Mapping[Action, int] = field(default_factory=dict)
    borrowed: Mapping[tuple[Action, int], int] = field(default_factory=dict)
    pairs: Mapping[Pair, Block] = field(default_factory=dict)

    def instructions(self, device: Device) -> Iterator[tuple[StepInstruction, int]]:
        """The instructions of one device, without carries; each with its microbatch.

        The microbatch is -1 before and after all stages.
        """
        yield from ((i, -1) for i in self.begin if device in i.devices)
        for event in self.events:
            if isinstance(event, Action):
                for instruction in self.on(device, event.stage, event.kind):
                    if instruction.is_for(event.microbatch):
                        yield instruction, self._microbatch(event, instruction)
            elif isinstance(event, Woven):
                for instruction, action in self.run_as_one(event):
                    if device in instruction.devices:
                        yield instruction, action.microbatch
        yield from ((i, -1) for i in self.end if device in i.devices)

    def run_as_one(self, event: Woven) -> Iterator[tuple[StepInstruction, Action]]:
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
            elif isinstance(event, Woven):
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

    # --- text -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"step of {self.name} on {','.join(map(str, self.devices))}"]
        lines[0] += f" by {self.num_routes} routes" if self.num_routes > 1 else ""
        lines[0] += " in halves" if self.num_halves > 1 else ""
        titled = {f"stage {stage} {run}:": block for (stage, run), block in self.blocks.items()}
        titled |= {f"pair {a}{f}&{b}{g}:": both for ((a, f), (b, g)), both in self.pairs.items()}
        for title, block in {"begin:": self.begin, **titled, "end:": self.end}.items():
            lines += [title, *(f"  {instruction}" for instruction in block)]
        lines.append("order:")
        borrowed: dict[Event, str] = {}
        for (action, owner), version in self.borrowed.items():
            borrowed[action] = borrowed.get(action, "") + f" {weights_of(owner)} v{version}"
        for event in self.events:
            version = self.versions.get(event, 0) if isinstance(event, Action) else 0
            own = f" v{version}" if version else ""
            lines.append(f"  {event}{own}{borrowed.get(event, '')}")
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
        blocks: dict[tuple[int, ActionKind], list[StepInstruction]] = {}
        pairs: dict[Pair, list[StepInstruction]] = {}
        around: dict[str, list[StepInstruction]] = {"begin:": [], "end:": []}
        events: list[Event] = []
        versions: dict[Action, int] = {}
        borrowed: dict[tuple[Action, int], int] = {}
        block: list[StepInstruction] | None = None
        is_order = False
        for number, line in enumerate(lines, 2):
            words = line.strip()
            if words == "order:":
                is_order = True
            elif words in around:
                block = around[words]
            elif (title := _BLOCK.fullmatch(words)) is not None:
                block = blocks.setdefault((int(title[1]), ActionKind(title[2])), [])
            elif (title := _PAIR.fullmatch(words)) is not None:
                ends = (int(title[1]), ActionKind(title[2])), (int(title[3]), ActionKind(title[4]))
                block = pairs.setdefault(ends, [])
            elif is_order:
                versioned = _VERSIONED.fullmatch(words)
                assert versioned is not None, "it matches every line"
                event = _event(number, versioned[1])
                events.append(event)
                if isinstance(event, Action):
                    versions |= {event: int(versioned[2])} if versioned[2] else {}
                    for owner, version in _BORROWED.findall(versioned[3]):
                        borrowed[event, int(owner)] = int(version)
            elif block is None:
                kinds = ", ".join(ActionKind)
                raise _unreadable(number, line, f"begin:', 'end:' or 'stage NUMBER {kinds}:")
            else:
                block.append(StepInstruction.parse(words))
        devices = tuple(map(int, found[2].split(",")))
        return cls(
            found[1],
            devices,
            {key: tuple(block) for key, block in blocks.items()},
            tuple(events),
            tuple(around["begin:"]),
            tuple(around["end:"]),
            num_routes=int(found[3] or 1),
            num_halves=2 if found[4] else 1,
            versions=versions,
            borrowed=borrowed,
            pairs={key: tuple(block) for key, block in pairs.items()},
        )

    # --- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a program that cannot run.

        Runs: every stage of one route runs each microbatch forward once, and then backward once, as
        a whole or for inputs and then for weights; it has a block for each such run. A program
        whose blocks are all forward, as nothing needs a gradient, has no backward.

        On every device: a backward uses what one forward kept, after it is back from host memory;
        nothing kept is left at the end; gradients of weights come after those of the inputs;
        weights are gathered before they are released; the gradient of an edge moves after its
        value. What is started is waited for once, by the same devices, before it is started again.

        Pairs: the instructions of either action are those of its block, in the same order.

        Versions: all runs of a stage for a microbatch read one version of its weights, which is
            kept until then; where the version of the forward is not kept, the backward reads the
            newest. An update comes after all gradients that it uses. The same holds for weights
            that a stage borrows.

        No two devices wait for each other, because all keep the one order of ``events`` and of each
        block.

        Raises:
            PlanError: names the instruction and what is missing.
        """
        self._check_halves()
        self._check_pairs()
        self._check_events()
        for device in self.devices:
            check_device(device, self.instructions(device))
        check_versions(self.everywhere)
        check_borrowed(self.events, self.borrowed, self._num_kept)

    @cached_property
    def _num_kept(self) -> Mapping[int, int]:
        """For each stage that is updated between microbatches, how many versions it keeps."""
        return {
            stage: instruction.keeps
            for (stage, run), block in self.blocks.items()
            for instruction in block
            if run is ActionKind.UPDATE and instruction.kind is Verb.UPDATE
        }

    def _check_halves(self) -> None:
        for instruction in (i for block in self.blocks.values() for i in block):
            in_halves = self.num_halves > 1 and instruction.kind not in OF_WEIGHTS
            if in_halves != (instruction.half is not None):
                wanted = "needs a half" if in_halves else "has a half, and is done once"
                raise PlanError(f"{instruction}: it {wanted} in this program.")

    def _check_pairs(self) -> None:
        for pair, block in self.pairs.items():
            for half, (stage, kind) in enumerate(pair):
                mine = _done(i for i in block if i.half == half)
                if mine != _done(self.blocks.get((stage, kind), ())):
                    raise PlanError(
                        f"pair {pair}: its instructions of stage {stage} {kind} are not those of "
                        "the stage's block, in the same order."
                    )
        for event in self.events:
            if isinstance(event, Woven) and pair_of(event) not in self.pairs:
                raise PlanError(f"{event}: there is no block of such pairs.")

    def _check_events(self) -> None:
        seen: Counter[Event] = Counter()
        alone: list[Action | Carry] = []
        for event in self.events:
            alone += [event] if isinstance(event, Carry) else actions_in(event)
        for event in alone:
            seen[event] += 1
            if isinstance(event, Carry):
                if event.is_back and not seen[replace(event, is_back=False)]:
                    raise PlanError(f"{event}: the value was not carried before its gradient.")
                continue
            if (event.stage, event.kind) not in self.blocks:
                raise PlanError(f"{event}: stage {event.stage} has no block {event.kind}.")
            if seen[event] > 1:
                raise PlanError(f"{event} is run twice.")
            done = (seen[replace(event, kind=kind)] for kind in GRADS)
            if event.kind is ActionKind.UPDATE and not any(done):
                raise PlanError(f"{event}: no gradients of its microbatch come before it.")
            for before in _BEFORE.get(event.kind, ()):
                needed = replace(event, kind=before)
                if not seen[needed]:
                    raise PlanError(f"{event}: {needed} has to be run before it.")
        forwards = {a for a in seen if isinstance(a, Action) and a.kind is ActionKind.FORWARD}
        # Where nothing needs a gradient, a step has forwards alone.
        goes_back = any(kind in _BACK for _, kind in self.blocks)
        for action in forwards if goes_back else ():
            whole, *halves = (replace(action, kind=kind) for kind in _BACK)
            if not seen[whole] and not any(seen[half] for half in halves):
                raise PlanError(f"{action} has no {whole} after it.")
            if not seen[whole] and not seen[halves[1]]:
                raise PlanError(f"{halves[0]} has no {halves[1]} after it.")
            if seen[whole] and any(seen[half] for half in halves):
                raise PlanError(f"{action} goes back twice: {whole} and its halves are run.")
        self._check_routes(forwards)

    def _check_routes(self, forwards: Iterable[Action]) -> None:
        """Every microbatch runs all stages of one route."""
        stages, size = {stage for stage, _ in self.blocks}, self._route_size
        ran: dict[int, set[int]] = {}
        for action in forwards:
            ran.setdefault(action.microbatch, set()).add(action.stage)
        for microbatch, mine in ran.items():
            routes = sorted({stage // size for stage in mine})
            if len(routes) > 1:
                raise PlanError(
                    f"microbatch {microbatch} is run at stages {sorted(mine)}, of routes {routes}: "
                    f"it goes one of {self.num_routes} routes of {size} stages."
                )
            for stage in sorted(stages - mine):
                if stage // size == routes[0]:
                    raise PlanError(f"no F of microbatch {microbatch} at stage {stage}.")


_BACK = (ActionKind.BACKWARD, ActionKind.INPUTS, ActionKind.WEIGHTS)

_BEFORE = {
    ActionKind.BACKWARD: (ActionKind.FORWARD,),
    ActionKind.RECOMPUTE: (ActionKind.FORWARD,),
    ActionKind.INPUTS: (ActionKind.FORWARD,),
    ActionKind.WEIGHTS: (ActionKind.INPUTS,),
}
"""For each kind of run of a stage, the kinds whose results it needs."""


def pair_of(event: Woven) -> Pair:
    """The stages and kinds of a pair's actions."""
    first, second = event.first, event.second
    return (first.stage, first.kind), (second.stage, second.kind)


def _done(block: Iterable[StepInstruction]) -> list[StepInstruction]:
    """The instructions of a block, in order; a move stands where it is waited for."""
    ended = (i for i in block if i.kind not in MOVES or i.phase is not Phase.START)
    return [replace(i, half=None, phase=Phase.WHOLE if i.kind in MOVES else i.phase) for i in ended]


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
