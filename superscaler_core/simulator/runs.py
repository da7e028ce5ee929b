"""Runs: cuts a stage where all of its devices communicate, so that runs in between can be cached.

At such a point all devices continue together, and no segment spans it. So the acts of a run do not
depend on the runs before and after it; its times depend on how much later than its first device
the other devices begin.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from superscaler_core.cost.wire import Port
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.known import Known
from superscaler_core.plan import Plan, Stage
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.sequence import Compute, Item, Move, moves_before, stage_items
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator.work import Act, Work

WHOLE = (ActionKind.TURN, ActionKind.FORWARD, ActionKind.BACKWARD)
"""The kinds of actions that are sequences of runs of ops."""

Turn = tuple[ActionKind, bool]
"""An action of a stage, and whether it is the first backward of its step."""


class RunActs(Sequence[Act]):
    """The acts of a run of ops, compared by identity."""

    def __init__(self, acts: Sequence[Act]) -> None:
        self._acts = acts
        wires = (act.wire for act in acts if act.wire is not None)
        shared = {port for wire in wires for port, _ in wire.shared}
        self.shared: tuple[Port, ...] = tuple(sorted(shared))

    def __len__(self) -> int:
        return len(self._acts)

    def __getitem__(self, i: Any) -> Any:
        return self._acts[i]


class StageActs(Sequence[Act]):
    """The acts of a stage: consecutive runs of ops; compared by identity."""

    def __init__(self, runs: Sequence[RunActs]) -> None:
        self.runs = runs
        self.shared = tuple(sorted({port for acts in runs for port in acts.shared}))

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __getitem__(self, i: Any) -> Any:
        return [act for acts in self.runs for act in acts][i]


# --- stages -------------------------------------------------------------------------------------


class KnownStage(Protocol):
    """A stage whose acts are computed once."""

    def acts(self, action: Action, *, is_first: bool) -> StageActs:
        """As ``Work.stage``; equal acts are one object."""


class UncutStage:
    """A stage that is built as a whole.

    Args:
        work: the work of its plan.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._found: dict[int, StageActs] = {}

    def acts(self, action: Action, *, is_first: bool) -> StageActs:
        """See ``KnownStage``."""
        acts = self._work.stage(action, is_first=is_first)
        # ``work`` keeps its acts alive, so identity tells them apart.
        if id(acts) not in self._found:
            self._found[id(acts)] = StageActs([RunActs(acts)])
        return self._found[id(acts)]


class CutStage:
    """A stage whose runs of ops are built separately, in the order of its forward."""

    def __init__(self, runs: Sequence[Mapping[Turn, RunActs]]) -> None:
        self.runs = runs
        self._found: dict[Turn, StageActs] = {}

    def acts(self, action: Action, *, is_first: bool) -> StageActs:
        """See ``KnownStage``; the acts are the same for all microbatches."""
        turn = action.kind, is_first
        if turn not in self._found:
            runs = self.runs[::-1] if action.kind is ActionKind.BACKWARD else self.runs
            self._found[turn] = StageActs([run[turn] for run in runs])
        return self._found[turn]


class Cutter:
    """Cuts stages into runs of ops; equal runs are built once.

    Args:
        work_of: computes the work of a plan.
        most: bound on cached runs.
    """

    def __init__(self, work_of: Callable[[Materialized], Work], most: int) -> None:
        self._work_of = work_of
        self.runs: Known[Hashable, Mapping[Turn, RunActs]] = Known(most)

    def stage(self, made: Materialized, stage: Stage) -> KnownStage:
        """A stage of a plan."""
        if not has_runs(made.plan):
            return UncutStage(self._work_of(made))
        if _shares_weights(made, stage):
            items = stage_items(made.plan, stage, made.edges)
            return CutStage([self._run(made, stage, items)])
        runs = []
        for key, steps in _cut(made, stage):
            run = self.runs.get(key)
            if run is None:
                items = tuple(item for step in steps for item in _items_of(made.plan, step))
                run = self.runs[key] = self._run(made, stage, items)
            runs.append(run)
        return CutStage(runs)

    def _run(
        self, made: Materialized, stage: Stage, items: Sequence[Item]
    ) -> Mapping[Turn, RunActs]:
        """The acts of a run of a stage with these items."""
        alone = tuple(tuple(items) if s is stage else () for s in made.plan.stages)
        work = self._work_of(replace(made, items=alone))
        turns = [(kind, False) for kind in made.stage_kinds[stage.index]]
        turns += [(kind, True) for kind, _ in turns if kind is ActionKind.BACKWARD]
        return {
            (kind, is_first): RunActs(work.stage(Action(kind, stage.index, 0), is_first=is_first))
            for kind, is_first in turns
        }


def has_runs(plan: Plan) -> bool:
    """Whether stages can be cut into runs of ops, with nothing under way in between."""
    actions = () if plan.schedule is None else plan.schedule.places
    is_whole = all(action.kind in WHOLE for action in actions)
    return plan.runs_in_order and not plan.has_orders and not plan.overlap and is_whole


def _shares_weights(made: Materialized, stage: Stage) -> bool:
    """Whether several ops of a stage read one weight, so that their gradients are added."""
    read = [t for op in stage.ops for t in op.inputs if t.name in made.plan.graph.parameters]
    return len(set(read)) < len(read)


# --- where a stage is cut -----------------------------------------------------------------------


def _cut(made: Materialized, stage: Stage) -> Iterable[tuple[Hashable, list[Op | Edge]]]:
    """The runs of a stage: the key of each, with its ops and moves in order."""
    devices = made.stage_devices[stage.index]
    moves = moves_before(made.edges, stage.index)
    runs: list[list[Op | Edge]] = [[]]
    place: dict[Op | Edge, int] = {}
    ordered = [(op.index, op) for op in stage.ops]
    last = [(index, None) for index in moves if index > stage.ops[-1].index]
    for index, op in (*ordered, *last):
        for edge in moves.get(index, ()):
            place[edge] = len(runs) - 1
            runs[-1].append(edge)
            if devices.issubset(edge.devices):
                runs.append([])
        if op is not None:
            place[op] = len(runs) - 1
            runs[-1].append(op)
    leaving: dict[PTensor, list[Edge]] = {}
    for edge in made.edges.all:
        if edge.src_stage == stage.index:
            leaving.setdefault(edge.tensor, []).append(edge)
    for number, steps in enumerate(runs):
        yield _key(made, steps, number, place, leaving), steps


def _key(
    made: Materialized,
    steps: Sequence[Op | Edge],
    number: int,
    place: Mapping[Op | Edge, int],
    leaving: Mapping[PTensor, Sequence[Edge]],
) -> Hashable:
    """The key of a run: all that its acts depend on.

    This is its ops with their splits, the edges of their inputs, its moves, and the readers of its
    results outside the run.
    """
    of_reader, readers = made.edges.of_reader, made.plan.graph.readers
    found: list[Hashable] = []
    for step in steps:
        found.append(step)
        if isinstance(step, Edge):
            continue
        found.append(made.plan.op_split(step))
        found += [of_reader.get((step, i)) for i in range(len(step.inputs))]
        for tensor in step.outputs:
            found += leaving.get(tensor, ())
            found += [
                place.get(reader) == number
                for reader, i in readers.get(tensor, ())
                if (reader, i) not in of_reader
            ]
            found += [place.get(edge) == number for edge in leaving.get(tensor, ())]
    return tuple(found)


def _items_of(plan: Plan, step: Op | Edge) -> Iterable[Item]:
    if isinstance(step, Edge):
        yield Move(step)
        return
    for part in plan.parts(step):
        device = plan.device(part)
        assert device is not None, f"{part} has no device; validate comes before"
        yield Compute(part, device)
