"""Versions: which version of its stage's weights every action of an asynchronous schedule reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from fractions import Fraction

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError

Rows = Sequence[Sequence[Action]]

GRADS = (ActionKind.BACKWARD, ActionKind.WEIGHTS)
"""Kinds of actions that complete the gradients of a stage's weights for a microbatch."""


class WeightRule(StrEnum):
    """Which version of a stage's weights a schedule with updates reads; the value is its spelling.

    Version 0 exists at the start, and the k-th update of a stage makes version k.
    """

    STASH = "stash"
    """A forward reads the newest version of its stage; its backward reads the same version."""
    VERTICAL = "vertical"
    """All stages read the version that was the newest of stage 0 when the first microbatch of the
    same update entered the pipeline; the backward reads the version of its forward."""
    NEWEST = "newest"
    """Every action reads the newest version, so a backward may read a later one than its forward.
    One version is kept."""


def versions_of(rows: Rows, rule: WeightRule, per_update: int) -> dict[Action, int]:
    """For every action, the version that it reads; for an update, the version that it makes.

    Raises:
        ScheduleError: an action would read a version that its stage has not made yet.
    """
    newest: dict[Action, int] = {}
    for row in rows:
        made: Counter[int] = Counter()
        for action in row:
            made[action.stage] += action.kind is ActionKind.UPDATE
            newest[action] = made[action.stage]
    found = {action: newest[_decides(action, rule, per_update)] for action in newest}
    for action, version in found.items():
        if version > newest[action]:
            raise ScheduleError(
                f"{action} is to read version {version} of the weights of stage {action.stage}, "
                f"which has made {newest[action]} by then."
            )
    return found


def _decides(action: Action, rule: WeightRule, per_update: int) -> Action:
    """The action at whose place in a row the newest version is the version ``action`` reads."""
    if action.kind is ActionKind.UPDATE or rule is WeightRule.NEWEST:
        return action
    if rule is WeightRule.STASH:
        return Action(ActionKind.FORWARD, action.stage, action.microbatch)
    return Action(ActionKind.FORWARD, 0, action.microbatch - action.microbatch % per_update)


def versions_kept(rows: Rows, versions: dict[Action, int], num_stages: int) -> tuple[int, ...]:
    """For each stage, the most versions that exist at one time, including the newest."""
    most = [1] * num_stages
    for row in rows:
        oldest: dict[int, int] = {}
        # From the end, ``oldest`` is the lowest version that a stage still reads.
        for action in reversed(row):
            stage, version = action.stage, versions[action]
            if action.kind is ActionKind.UPDATE:
                most[stage] = max(most[stage], version - oldest.get(stage, version) + 1)
            else:
                oldest[stage] = min(oldest.get(stage, version), version)
    return tuple(most)


def delays_of(
    versions: dict[Action, int], num_stages: int, num_microbatches: int, per_update: int
) -> tuple[Fraction, ...]:
    """For each stage, the average age, in updates, of the weights of the last update's forwards."""
    last = range(num_microbatches - per_update, num_microbatches)
    found = []
    for stage in range(num_stages):
        changed = versions[Action(ActionKind.UPDATE, stage, num_microbatches - 1)] - 1
        read = (versions[Action(ActionKind.FORWARD, stage, mb)] for mb in last)
        found.append(Fraction(sum(changed - version for version in read), per_update))
    return tuple(found)


def check_updates(what: str, num_microbatches: int, rows: Rows, rule: WeightRule | None) -> int:
    """Check the updates of a complete schedule; return the number of microbatches per update.

    Without updates, it is the number of all microbatches: weights are updated after the schedule.

    Raises:
        ScheduleError: names the update, and what would be correct.
    """
    updates = {a for row in rows for a in row if a.kind is ActionKind.UPDATE}
    if not updates and rule is None:
        return num_microbatches
    if not updates or rule is None:
        raise ScheduleError(
            f"{what}: it has {len(updates)} updates and weights={rule}; a schedule with updates "
            f"needs a rule ({', '.join(WeightRule)}), and one without has none."
        )
    if any(action.kind is ActionKind.RECYCLE for row in rows for action in row):
        raise ScheduleError(f"{what}: microbatches that are recycled have no updates between them.")
    size = min(action.microbatch for action in updates) + 1
    for row in rows:
        _check_row(what, row, size, num_microbatches)
    return size


def _check_row(what: str, row: Sequence[Action], size: int, num_microbatches: int) -> None:
    """Check that each stage updates after the gradients of every ``size`` microbatches."""
    for stage in {action.stage for action in row}:
        mine = [a for a in row if a.stage == stage and a.kind in (*GRADS, ActionKind.UPDATE)]
        ends = [number for number, a in enumerate(mine) if a.kind is ActionKind.UPDATE]
        done, before = 0, 0
        for number in ends:
            group = sorted(action.microbatch for action in mine[before:number])
            last = mine[number].microbatch
            if group != list(range(done, done + size)) or last != done + size - 1:
                raise ScheduleError(
                    f"{what}: {mine[number]} comes after the gradients of microbatches {group}; "
                    f"stages update after every {size} microbatches, here {done} to "
                    f"{done + size - 1}, and are named after the last."
                )
            done, before = done + size, number + 1
        if done != num_microbatches:
            raise ScheduleError(
                f"{what}: stage {stage} updates with {done} of {num_microbatches} microbatches; "
                f"every {size} of them have an update after their gradients."
            )
