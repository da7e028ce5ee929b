"""Execute: runs the instructions of a step program on one rank.

Every instruction of the rank's device is *bound* once: it becomes a function of the rank and of a
``Frame``, which has the values of one run of a stage. A step calls these functions in the program's
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from superscaler_core.plan import Device
from superscaler_core.program.event import Carry, Event, Woven, actions_in, pair_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.run.binder import Binder, Bound
from superscaler_core.run.frame import Frame
from superscaler_core.run.rank import Rank
from superscaler_core.run.tables import Tables
from superscaler_core.run.tape import SegmentFunction
from superscaler_core.schedules import Action, ActionKind


@dataclass(frozen=True, slots=True)
class _Line:
    """A bound instruction of a block.

    Attributes:
        run: runs it.
        half: the half of the microbatch, or the action of a pair, whose frame it works on.
        microbatch: the only microbatch for which it is done; None for all.
    """

    run: Bound
    half: int
    microbatch: int | None


class Executor:
    """Runs the step program of a plan on one device.

    Args:
        made: the plan with its step program.
        device: the device.
        functions: the functions of the device's segments, by name.
        tables: the tables of the rank.

    Attributes:
        TABLES: the tables of the rank.
    """

    def __init__(
        self,
        made: Materialized,
        device: Device,
        functions: Mapping[str, SegmentFunction],
        tables: Tables,
    ) -> None:
        self._made, self._device, self._functions = made, device, functions
        self.TABLES = tables
        self._program = made.step_program
        self._num_halves = self._program.num_halves
        self._blocks: dict[object, Sequence[_Line]] = {}
        self._events = [self._event(event) for event in made.events_on[device]]
        self._around = [
            self._bound(block, None) for block in (self._program.begin, self._program.end)
        ]

    def step(self, rank: Rank) -> None:
        """Run one step."""
        begin, end = self._around
        rank.begin()
        for line in begin:
            line.run(rank, Frame(-1))
        for event in self._events:
            event(rank)
        for line in end:
            line.run(rank, Frame(-1))

    # --- events ---------------------------------------------------------------------------------

    def _event(self, event: Event) -> Callable[[Rank], None]:
        if isinstance(event, Carry):
            carry = Rank.carry_back if event.is_back else Rank.carry
            return lambda rank: carry(rank, event.name, event.microbatch)
        if isinstance(event, Woven):
            lines = self._block(pair_of(event), self._program.pairs[pair_of(event)])
            mbs = [run.microbatch for run in actions_in(event)]
            return lambda rank: _run(rank, lines, [Frame(mb) for mb in mbs])
        return self._action(event)

    def _action(self, event: Action) -> Callable[[Rank], None]:
        """A run of a stage, with the version of weights that it reads."""
        key = event.stage, event.kind
        run = partial(self._run_block, self._block(key, self._program.blocks[key]))
        mb = event.microbatch * self._num_halves
        if event.kind is ActionKind.UPDATE:
            return lambda rank: run(rank, mb)
        if event.kind is ActionKind.TURN:
            return lambda rank: rank.without_grad(run, mb, turn=event.turn)
        made, version = self._made, self._program.versions.get(event, 0)
        borrowed = {
            use.name: made.borrowed[event, use.owner]
            for use in made.borrowers.get(event.stage, ())
            if use.owner is not None and self._device in use.side.shards
        }
        is_back = event.kind is not ActionKind.FORWARD
        if version or any(borrowed.values()) or (is_back and made.has_one_version):
            reads = Rank.reads_back if is_back else Rank.reads
            return lambda rank: reads(rank, run, mb, version=version, borrowed=borrowed)
        return lambda rank: run(rank, mb)

    def _run_block(self, lines: Sequence[_Line], rank: Rank, mb: int) -> None:
        _run(rank, lines, [Frame(mb + half) for half in range(self._num_halves)])

    def _block(self, key: Any, block: Iterable[StepInstruction]) -> Sequence[_Line]:
        if key not in self._blocks:
            self._blocks[key] = self._bound(block, key)
        return self._blocks[key]

    def _bound(self, block: Iterable[StepInstruction], key: Any) -> Sequence[_Line]:
        """The instructions of this device in a block."""
        mine = [i for i in block if self._device in i.devices]
        is_pair = key is not None and isinstance(key[0], tuple)
        binders = [
            Binder(self._made, stage, self._device, self._functions)
            for stage, _ in (key if is_pair else [key or (0, None)])
        ]
        scale = 1 if is_pair else self._num_halves
        return [
            _Line(
                binders[(i.half or 0) if is_pair else 0].bound(i),
                i.half or 0,
                None
                if i.microbatch is None
                else i.microbatch * scale + (scale - 1) * (i.half or 0),
            )
            for i in mine
        ]


def _run(rank: Rank, lines: Sequence[_Line], frames: Sequence[Frame]) -> None:
    for line in lines:
        frame = frames[line.half]
        if line.microbatch is None or line.microbatch == frame.mb:
            line.run(rank, frame)
