"""Asynchronous schedules: versions of weights, delays, and idle time."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

import superscaler_core as ss
from superscaler_core.published.asynchronous import (
    ampnet,
    pipedream,
    pipedream_2bw,
    pipemare,
    with_updates,
)
from superscaler_core.published.chimera import chimera
from superscaler_core.schedules import (
    Action,
    ActionKind,
    WeightRule,
    grid,
    interleaved,
    one_f_one_b,
    split_backward,
    timeline,
)

MAKERS: dict[str, Callable[[int, int], ss.Schedule]] = {
    "pipedream": pipedream,
    "vertical": lambda d, n: pipedream(d, n, vertical=True),
    "2bw": lambda d, n: pipedream_2bw(d, n * d),
    "ampnet": ampnet,
    "pipemare": pipemare,
    "interleaved": lambda d, n: with_updates(interleaved(d, d * n, 2), 1, WeightRule.STASH),
}
SIZES = [(1, 3), (3, 2), (4, 8)]
CASES = pytest.mark.parametrize(
    "schedule", [make(d, n) for make in MAKERS.values() for d, n in SIZES], ids=repr
)


def read(schedule: ss.Schedule, kind: ActionKind, stage: int) -> list[int]:
    """The versions that the actions of one kind read at a stage, by microbatch."""
    microbatches = range(schedule.num_microbatches)
    return [schedule.versions[Action(kind, stage, mb)] for mb in microbatches]


def test_pipedream_keeps_and_reads_the_versions_of_its_authors_code() -> None:
    schedule = pipedream(4, 8)
    assert schedule.versions_kept == (4, 3, 2, 1)
    assert schedule.delays == (3, 2, 1, 0)
    assert [read(schedule, ActionKind.FORWARD, stage) for stage in range(4)] == [
        [0, 0, 0, 0, 1, 2, 3, 4],
        [0, 0, 0, 1, 2, 3, 4, 5],
        [0, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


def test_grid_shows_the_time_of_updates() -> None:
    picture = """
pipedream: makespan 11, idle 2/11 of it, peak microbatches 2 1
time      0  1  2  3  4  5  6  7  8  9 10
worker 0 F0 F1 -- B0 U0 F2 B1 U1 -- B2 U2
worker 1 -- F0 B0 U0 F1 B1 U1 F2 B2 U2 --"""
    assert "\n" + grid(pipedream(2, 3)) == picture


@pytest.mark.parametrize("d, n", SIZES)
def test_with_vertical_sync_all_stages_read_the_version_of_the_first(d: int, n: int) -> None:
    schedule = pipedream(d, n, vertical=True)
    expected = [max(0, mb - d + 1) for mb in range(n)]
    assert all(read(schedule, ActionKind.FORWARD, stage) == expected for stage in range(d))
    assert all(read(schedule, ActionKind.BACKWARD, stage) == expected for stage in range(d))
    assert schedule.versions_kept == (min(d, n),) * d


@pytest.mark.parametrize("d, every", [(2, 2), (2, 5), (4, 4), (4, 7), (3, 3)])
def test_2bw_keeps_two_versions_and_is_always_one_update_behind(d: int, every: int) -> None:
    """The delay was remembered from the paper and not checked."""
    schedule = pipedream_2bw(d, 4 * every, every=every)
    expected = [max(0, mb // every - 1) for mb in range(4 * every)]
    assert all(read(schedule, ActionKind.FORWARD, stage) == expected for stage in range(d))
    assert schedule.versions_kept == (2,) * d
    assert schedule.delays == (1,) * d


@pytest.mark.parametrize(
    "stages, every, delays",
    [
        (4, 4, ("7/4", "5/4", "3/4", "1/4")),
        (4, 1, (7, 5, 3, 1)),
        (8, 8, ("15/8", "13/8", "11/8", "9/8", "7/8", "5/8", "3/8", "1/8")),
    ],
)
def test_delays_of_pipemare(stages: int, every: int, delays: tuple[str | int, ...]) -> None:
    """The figures were remembered from the paper and not checked."""
    schedule = pipemare(stages, 4 * stages * every, every=every)
    assert schedule.delays == tuple(map(Fraction, delays))


@CASES
def test_asynchronous_schedule_parses_back(schedule: ss.Schedule) -> None:
    assert ss.Schedule.parse(str(schedule)) == schedule


@CASES
def test_backward_reads_the_version_of_its_forward_unless_the_rule_is_newest(
    schedule: ss.Schedule,
) -> None:
    for stage in range(schedule.num_stages):
        forward = read(schedule, ActionKind.FORWARD, stage)
        backward = read(schedule, ActionKind.BACKWARD, stage)
        newest = schedule.weights is WeightRule.NEWEST
        assert backward == (list(range(len(forward))) if newest else forward)


@CASES
def test_number_of_versions_kept_is_exactly_what_actions_read(schedule: ss.Schedule) -> None:
    """All versions that are read are among the last ``versions_kept``, and the oldest is read."""
    used = [1] * schedule.num_stages
    for row in schedule.rows:
        made = [0] * schedule.num_stages
        for number, action in enumerate(row):
            stage = action.stage
            made[stage] += action.kind is ActionKind.UPDATE
            left = [schedule.versions[a] for a in row[number:] if a.stage == stage]
            oldest = min([made[stage], *left])
            assert made[stage] - oldest < schedule.versions_kept[stage]
            if action.kind is ActionKind.UPDATE:
                used[stage] = max(used[stage], made[stage] - oldest + 1)
    assert used == list(schedule.versions_kept)


@pytest.mark.parametrize("name", ["pipedream", "vertical", "2bw", "ampnet"])
def test_between_fill_and_drain_no_worker_is_idle(name: str) -> None:
    """Idle time does not grow with the length of the run, so the steady state has none."""
    times = {"F": 1, "B": 2}
    short, long = (timeline(MAKERS[name](4, n), times) for n in (8, 24))
    assert short.idle == long.idle == (9, 9, 9, 9)


def test_halves_of_backwards_come_before_their_update() -> None:
    schedule = split_backward(pipedream(3, 6))
    assert schedule.versions_kept == (3, 2, 1)
    assert "0I0 0W0 0U0" in str(schedule)
    late = with_updates(split_backward(one_f_one_b(3, 6), 1), 2, WeightRule.STASH)
    assert "0W0 0F4 0I2 0W1 0U1" in str(late)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: pipedream(2, 4, every=3), "an update after every 3 leaves some without"),
        (lambda: pipedream_2bw(4, 8, every=2), "let it have 4 or more"),
        (lambda: with_updates(chimera(2, 2), 1, WeightRule.STASH), "cannot be updated apart"),
        (lambda: ss.Schedule.parse(str(pipedream(2, 4)).replace(" weights=stash", "")),
         "needs a rule"),
        (lambda: ss.Schedule.parse(str(one_f_one_b(2, 4)).replace("s=4", "s=4 weights=newest")),
         "it has 0 updates and weights=newest"),
        (lambda: ss.Schedule.parse(str(pipedream(2, 2)).replace("1B1 1U1", "1B1")),
         "stage 1 updates with 1 of 2 microbatches"),
        (lambda: ss.Schedule.parse(str(pipedream(2, 2)).replace("1B0 1U0", "1U0 1B0")),
         "1U0 comes after the gradients of microbatches"),
        (lambda: split_backward(pipedream(2, 4), 1), "comes after the gradients"),
        (
            lambda: ss.Schedule.parse(
                "late stages=2 microbatches=2 weights=vertical\n"
                "worker 0: 0F0 0B0 0U0 0F1 0B1 0U1\nworker 1: 1F0 1F1 1B0 1U0 1B1 1U1"
            ),
            "1F1 is to read version 1 of the weights of stage 1, which has made 0",
        ),
    ],
)  # fmt: skip
def test_schedule_with_invalid_updates_is_rejected(
    make: Callable[[], ss.Schedule], words: str
) -> None:
    with pytest.raises(ss.ScheduleError, match=words):
        make()
