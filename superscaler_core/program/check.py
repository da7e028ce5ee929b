"""Check: one rule for a step program; a program that obeys it can run.

On every device, and for every microbatch:

* an instruction or a transfer reads only values that exist: another one before it has made them;
* it makes only values that do not exist, or adds to a sum (``SUMMED``);
* values that live in a run (``IN_BLOCK``) are made and freed in one block, by their last reader;
* after the step nothing is left but weights, fetched copies, the loss and the results. A flight is
  a value that a start makes and a wait takes, so what is started is waited for.

This suffices, because an instruction waits for its own device's instructions before it, and for
the other devices of the same instruction or transfer, which stands once in the one order that all
devices keep. The earliest instruction that is not done can always be done, so devices do not wait
in a circle.

A block is the same for all microbatches. So what it needs, makes and frees is found once, as an
``Effect``, and the step is a walk over the effects of its events. Devices that take part in the
same instructions with the same values are alike, and one of them is walked for all. Which segments,
edges and weights the values are parts of is the plan's (``program.bound``); which version of
weights is read is ``version_check``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.effect import HALVES, Effects, Key, effects_of
from superscaler_core.program.event import Event, OverlappedPair, P2PSend, actions_in
from superscaler_core.program.form import check_form
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role
from superscaler_core.program.verb import Phase, Verb
from superscaler_core.program.version_check import check_borrowed, check_versions

if TYPE_CHECKING:
    from superscaler_core.program.step_program import StepProgram


def check(program: StepProgram) -> None:
    """Refuse a program that cannot run.

    Raises:
        PlanError: names the instruction, the device, the microbatch and the value.
    """
    check_form(program)
    walk = _Walk(program, representatives(program))
    walk.block(program.begin, {0: None})
    for event in program.events:
        walk.event(event)
    walk.block(program.end, {0: None})
    check_versions(program)
    check_borrowed(program)
    walk.end()


def representatives(program: StepProgram) -> tuple[Device, ...]:
    """The first of all devices that take part in the same instructions, with the same values."""
    done: dict[Device, list[int]] = {device: [] for device in program.devices}
    for number, instruction in enumerate(i for block in program.all_blocks for i in block):
        values = (*instruction.reads, *instruction.writes, *instruction.frees)
        apart = [place for place, value in enumerate(values) if value.devices]
        for device in instruction.devices:
            done[device].append(number)
            # Places in the instruction are negative, so that they are no other instruction.
            done[device] += [-1 - place for place in apart if device in values[place].devices]
    first: dict[object, Device] = {}
    for device in sorted(done):
        first.setdefault(tuple(done[device]), device)
    return tuple(first.values())


class _Walk:
    """The values that exist on some devices after the events so far."""

    def __init__(self, program: StepProgram, devices: Sequence[Device]) -> None:
        self._program, self._devices = program, devices
        self._known: dict[object, Effects] = {}
        self._of_step: dict[Device, set[Key]] = {device: set() for device in devices}
        self._live: dict[tuple[Device, int | None], set[Key]] = {}
        self._senders, self._readers = _ends(i for block in program.all_blocks for i in block)
        # Blocks that differ by microbatch.
        self._special = {
            key for key, block in program.blocks.items()
            if any(i.microbatch is not None for i in block)
        }  # fmt: skip
        self._recycle()

    def _recycle(self) -> None:
        """In the first pass of a microbatch, recycled values exist: they are zeros."""
        recycled = {
            key: [i for i in block if i.kind is Verb.RECYCLED]
            for key, block in self._program.blocks.items()
        }
        for run in (run for event in self._program.events for run in actions_in(event)):
            for i in recycled[run.stage, run.kind]:
                for device in self._among(i.devices):
                    key = f"{HALVES[i.half or 0]}{Role.SENT}:{i.name}"
                    self._of(device, run.microbatch).add(key)

    def _among(self, devices: Collection[Device]) -> list[Device]:
        return [device for device in self._devices if device in devices]

    def _of(self, device: Device, microbatch: int | None) -> set[Key]:
        return self._live.setdefault((device, microbatch), set())

    def event(self, event: Event) -> None:
        """Add an event."""
        program = self._program
        if isinstance(event, P2PSend):
            self._p2p_send(event)
        elif isinstance(event, OverlappedPair):
            mbs = {half: run.microbatch for half, run in enumerate(actions_in(event))}
            self.block([i for i, _ in program.run_as_one(event)], mbs)
        else:
            block, mb = program.blocks[event.stage, event.kind], event.microbatch
            is_special = (event.stage, event.kind) in self._special
            key = event.stage, event.kind, mb if is_special else None
            mine = [i for i in block if i.is_for(mb)] if is_special else block
            self.block(mine, {0: mb}, key)

    def block(
        self, block: Sequence[StepInstruction], mbs: Mapping[int, int | None], key: object = None
    ) -> None:
        """Add the instructions of a block, in order.

        Args:
            block: the instructions.
            mbs: the microbatch of each half, if the halves are two actions; of half 0 otherwise.
            key: equal for equal blocks; None if there is none.
        """
        found = self._known.get(key) if key is not None else None
        if found is None:
            found = effects_of(block, self._devices)
            self._known[key] = found
        pairs = [(effect, self._of_step[device]) for device, effect in found.of_step.items()]
        for half, mb in mbs.items():
            mine = found
            if len(mbs) > 1:
                alone = [replace(i, half=None) for i in block if i.half == half]
                mine = effects_of(alone, self._devices)
            pairs += [(effect, self._of(d, mb)) for d, effect in mine.of_microbatch.items()]
        if any(not effect.needs <= live or effect.fresh & live for effect, live in pairs):
            self._explain(block, mbs)
        for effect, live in pairs:
            live -= effect.frees
            live |= effect.makes

    def _explain(self, block: Sequence[StepInstruction], mbs: Mapping[int, int | None]) -> None:
        """Refuse a block that cannot run now: find the first instruction that cannot.

        Raises:
            PlanError: always.
        """
        for instruction in block:
            alone = effects_of([instruction], self._devices, is_whole=False)
            mb = mbs[(instruction.half or 0) if len(mbs) > 1 else 0]
            for device in self._among(instruction.devices):
                here = f"device {device}" + ("" if mb is None else f", microbatch {mb}")
                sides = (alone.of_step.get(device), self._of_step[device]), (
                    alone.of_microbatch.get(device), self._of(device, mb)
                )  # fmt: skip
                for effect, live in sides:
                    if effect is None:
                        continue
                    for key in sorted(effect.needs - live):
                        raise PlanError(f"{here}: {instruction.short}: {_missing(key)}.")
                    for key in sorted(effect.fresh & live):
                        raise PlanError(f"{here}: {instruction.short}: {key} exists already.")
                    live -= effect.frees
                    live |= effect.makes
        raise AssertionError("some instruction is refused")

    def _p2p_send(self, event: P2PSend) -> None:
        """Add a transfer to another stage or pass, or out of the program."""
        halves = self._program.num_halves
        mb, half = divmod(event.microbatch, halves)
        prefix, name = HALVES[half], event.name
        sent, brought = (Role.OUT_BACK, Role.SENT_BACK) if event.is_back else (
            Role.OUT, Role.SENT
        )  # fmt: skip
        senders = self._senders.get((name, event.is_back), ())
        if not senders:
            raise PlanError(f"{event}: no stage sends it.")
        for device in self._among(senders):
            live, key = self._of(device, mb), f"{prefix}{sent}:{name}"
            if key not in live:
                raise PlanError(f"device {device}: {event}: {_missing(key)}.")
            live.discard(key)
        readers = self._readers.get((name, event.is_back), self._program.devices)
        for device in self._among(readers):
            live, key = self._of(device, mb), f"{prefix}{brought}:{name}"
            if key in live:
                raise PlanError(f"device {device}: {event}: {key} exists already.")
            live.add(key)

    def end(self) -> None:
        """Check that nothing is left but weights, the loss and the results."""
        everything = [i for block in self._program.all_blocks for i in block]
        done = (i for i in everything if i.kind is Verb.FETCH and i.phase is not Phase.START)
        fetched = (value.key for i in done for value in i.writes)
        staying = {f"{Role.TOTAL}:loss", *fetched}
        spare = _spare_sums(everything)
        for device, live in self._of_step.items():
            if f"{Role.TOTAL}:loss" not in live:
                raise PlanError(f"device {device}: the step has no loss; no instruction sums it.")
            for key in sorted(live - staying):
                if key in spare and device not in spare[key]:
                    continue
                raise PlanError(f"device {device}: nothing takes {key} before the step ends.")
        results = tuple(
            f"{half}{Role.SENT}:{name}"
            for name, is_back in self._senders if not is_back
            for half in HALVES if (name, is_back) not in self._readers
        )  # fmt: skip
        for (device, mb), live in self._live.items():
            for key in sorted(live.difference(results)):
                raise PlanError(
                    f"device {device}, microbatch {mb}: nothing takes {key} before the step ends."
                )


def _spare_sums(everything: Iterable[StepInstruction]) -> Mapping[Key, set[Device]]:
    """Gradients that some device updates with as they are, and all devices that hand theirs on.

    A replica of an op that does not store its weight makes such a gradient too, which is dropped.
    """
    updated: set[Key] = set()
    taken: dict[Key, set[Device]] = {}
    for i in everything:
        for value in i.reads if i.kind in (Verb.UPDATE, Verb.REDUCE) else ():
            if value.role is Role.SUM:
                taken.setdefault(value.key, set()).update(value.devices or i.devices)
                updated |= {value.key} if i.kind is Verb.UPDATE else set()
    return {key: devices for key, devices in taken.items() if key in updated}


Ends = Mapping[tuple[str, bool], Sequence[Device]]
"""By name of an edge, and whether it is its gradient: the devices at one end."""


def _ends(
    instructions: Iterable[StepInstruction],
) -> tuple[Ends, Ends]:
    """The devices that send over edges, and those that receive."""
    senders: dict[tuple[str, bool], Sequence[Device]] = {}
    readers: dict[tuple[str, bool], Sequence[Device]] = {}
    for i in instructions:
        match i.kind:
            case Verb.SEND | Verb.SEND_BACK:
                senders[i.name, i.kind is Verb.SEND_BACK] = i.devices
            case Verb.RECEIVE | Verb.RECYCLED | Verb.RECEIVE_BACK:
                readers[i.name, i.kind is Verb.RECEIVE_BACK] = i.devices
    return senders, readers


def _missing(key: Key) -> str:
    """What it means that a value does not exist, for a person."""
    role = Role(key.rpartition("half 1 ")[2].partition(":")[0])
    return f"{key} is not there: {_MEANING.get(role, 'nothing has made it before')}"


_MEANING = {
    Role.COPY: "these weights are not gathered",
    Role.KEPT: "no forward has kept it, or its backward has run",
    Role.HALF: "the gradients of the inputs come first",
    Role.HOST: "nothing has copied it to host memory",
    Role.FLIGHT: "it was not started",
    Role.SENT: "no transfer has brought it",
    Role.SENT_BACK: "no transfer has brought it",
    Role.OUT: "its stage has not left it",
    Role.OUT_BACK: "its stage has not left it",
    Role.SUM: "no backward has added to it",
    Role.STORED: "no reduction has added to it",
    Role.LOSS: "no forward has added to it",
}
"""By role, why a value is missing."""
