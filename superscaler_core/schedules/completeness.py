"""Completeness: checks that a new schedule has every action once, on the right workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from itertools import pairwise

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError

Cell = dict[Action, list[int]]
"""The actions of one microbatch at one stage, each with the workers that run it."""

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUTS, ActionKind.WEIGHTS)

Cells = dict[tuple[int, int], Cell]
"""The cell of each stage and microbatch."""


def check_complete(
    what: str, num_stages: int, num_microbatches: int, rows: tuple[tuple[Action, ...], ...]
) -> None:
    """Check that the rows are one training step of all microbatches through all stages.

    Raises:
        ScheduleError: names the action and the worker, and what would be correct.
    """
    cells: Cells = {}
    for worker, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"{what}: worker {worker} runs nothing; leave it out.")
        for action in row:
            if action.stage >= num_stages or action.microbatch >= num_microbatches:
                raise ScheduleError(
                    f"{what}: {action} is not one of its actions: stages are 0 to "
                    f"{num_stages - 1}, microbatches 0 to {num_microbatches - 1}."
                )
            cell = cells.setdefault((action.stage, action.microbatch), {})
            workers = cell.setdefault(action, [])
            if worker in workers:
                raise ScheduleError(
                    f"{what}: worker {worker} runs {action} twice; it has to run once."
                )
            workers.append(worker)
    _check_nothing_missing(what, num_stages, num_microbatches, cells)
    _check_same_workers(what, cells)
    _check_teams(what, cells)
    _check_passes(what, cells)


def _check_nothing_missing(what: str, num_stages: int, num_microbatches: int, cells: Cells) -> None:
    # Stops at the first gap, so the loop runs at most once more than there are actions.
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            cell = cells.get((stage, microbatch), {})
            whole, *halves = (Action(kind, stage, microbatch) for kind in _BACKWARDS)
            if whole in cell and not cell.keys().isdisjoint(halves):
                half = next(action for action in halves if action in cell)
                raise ScheduleError(
                    f"{what}: {whole} and {half} are both run; B is I and W in one, so a "
                    "microbatch has either B or both of these."
                )
            back = [whole] if cell.keys().isdisjoint(halves) else halves
            for action in (Action(ActionKind.FORWARD, stage, microbatch), *back):
                if action not in cell:
                    raise ScheduleError(
                        f"{what}: no worker runs {action}; every microbatch has one F and one B, "
                        "or one F, one I and one W, at every stage."
                    )


def _check_same_workers(what: str, cells: Cells) -> None:
    for (stage, microbatch), cell in cells.items():
        forward = Action(ActionKind.FORWARD, stage, microbatch)
        for action, workers in cell.items():
            if workers != cell[forward]:
                raise ScheduleError(
                    f"{what}: {forward} runs on workers {cell[forward]} and {action} on "
                    f"{workers}; a stage runs all actions of a microbatch on the same workers."
                )


def _check_teams(what: str, cells: Cells) -> None:
    """Check that the workers of a stage form teams: copies of the stage that share no worker."""
    teams: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for (stage, microbatch), cell in cells.items():
        team = cell[Action(ActionKind.FORWARD, stage, microbatch)]
        for worker in team:
            earlier, expected = teams.setdefault((stage, worker), (microbatch, team))
            if team != expected:
                raise ScheduleError(
                    f"{what}: stage {stage} runs microbatch {earlier} on workers {expected} and "
                    f"microbatch {microbatch} on {team}; workers that share a stage run the same "
                    "microbatches of it."
                )


def _check_passes(what: str, cells: Cells) -> None:
    """Check that a microbatch is recycled equally often at all stages."""
    seen: dict[int, tuple[int, list[int]]] = {}
    for (stage, microbatch), cell in cells.items():
        passes = sorted(
            action.recycling_pass for action in cell if action.kind is ActionKind.RECYCLE
        )
        if passes != list(range(len(passes))):
            raise ScheduleError(
                f"{what}: stage {stage} runs microbatch {microbatch} without gradient in passes "
                f"{passes}; passes count up from 0."
            )
        first, expected = seen.setdefault(microbatch, (stage, passes))
        if passes != expected:
            raise ScheduleError(
                f"{what}: microbatch {microbatch} runs without gradient {len(expected)} times at "
                f"stage {first} and {len(passes)} times at stage {stage}; all stages have to "
                "run it equally often."
            )


def check_pairs(
    what: str, rows: tuple[tuple[Action, ...], ...], pairs: Set[tuple[Action, Action]]
) -> None:
    """Check that each pair is a forward with the backward of another microbatch right behind."""
    if not pairs:
        return
    neighbours = {pair for row in rows for pair in pairwise(row)}
    members = Counter(action for pair in pairs for action in pair)
    for first, then in sorted(pairs):
        kinds = first.kind is ActionKind.FORWARD and then.kind.goes_back
        if not kinds or first.microbatch == then.microbatch:
            raise ScheduleError(
                f"{what}: {first}&{then} is no pair; a pair is a forward and the backward of "
                "another microbatch, such as 0F3&1B2."
            )
        if (first, then) not in neighbours or members[first] + members[then] > 2:
            raise ScheduleError(
                f"{what}: of pair {first}&{then} the second has to be right behind the first in "
                "its row, and each in no other pair."
            )
