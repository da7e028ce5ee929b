"""Laws of schedules as values: text, and errors for invalid input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import superscaler_core as ss
from superscaler_core.schedules import Action, gpipe, one_f_one_b, timeline
from superscaler_core.schedules.action import KINDS
from tests.superscaler_core.schedule_rows import SMALL, own, text_of

NUMBERS = st.integers(0, 999_999_999)
ACTIONS = st.one_of(
    st.builds(Action, st.sampled_from(sorted(KINDS)), NUMBERS, NUMBERS),
    st.builds(Action, st.just("f"), NUMBERS, NUMBERS, NUMBERS),
)


@given(ACTIONS)
def test_parse_undoes_str_of_an_action(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{len(s.rows)}-{s.num_stages}")
def test_parse_undoes_str_of_a_schedule(schedule: ss.Schedule) -> None:
    assert ss.Schedule.parse(str(schedule)) == schedule


def test_schedule_with_shared_stages_and_turns_parses_back() -> None:
    text = text_of("0f3 0F0 1F0 1B0 0B0", "0f3 0F0 0B0", stages=2, microbatches=1)
    text = text.replace("0f3", "0f0 0f0.1").replace("1F0", "1f0 1f0.1 1F0")
    assert str(ss.Schedule.parse(text)) == text


def test_equal_schedules_have_equal_hashes_and_are_immutable() -> None:
    assert hash(gpipe(3, 4)) == hash(gpipe(3, 4))
    assert len({gpipe(3, 4), gpipe(3, 4), one_f_one_b(3, 4)}) == 2
    with pytest.raises(AttributeError):
        gpipe(3, 4).name = "other"  # type: ignore[misc]


def test_rows_may_be_lists_and_are_not_modified() -> None:
    rows = [[Action("F", 0, 0), Action("B", 0, 0)]]
    assert ss.Schedule("own", 1, 1, rows).rows == ((Action("F", 0, 0), Action("B", 0, 0)),)  # type: ignore[arg-type]
    assert rows == [[Action("F", 0, 0), Action("B", 0, 0)]]


@pytest.mark.parametrize(
    "text", ["", "F3", "1F", "1G3", "-1F3", "1F3.1", "1F 3", "1F٣", "1f3.", "1F" + "9" * 10]
)
def test_parse_rejects_invalid_actions(text: str) -> None:
    with pytest.raises(ss.ScheduleError, match=r"cannot parse action|only f is run in passes"):
        Action.parse(text)


@pytest.mark.parametrize(
    "text, match",
    [
        ("", r"line 1 of a schedule, '': expected 'NAME stages=COUNT microbatches=COUNT'"),
        ("own stages=1", "line 1 of a schedule, 'own stages=1'"),
        ("own stages=1 microbatches=1\nworker 1: 0F0 0B0", "line 2 .* expected 'worker 0: ACTION"),
        ("own stages=1 microbatches=1\n0F0 0B0", "line 2 .* expected 'worker 0: ACTION"),
        ("own stages=1 microbatches=1\nworker 0: 0F0 0X0", "cannot parse action '0X0'"),
    ],
)
def test_parse_rejects_invalid_schedules(text: str, match: str) -> None:
    with pytest.raises(ss.ScheduleError, match=match):
        ss.Schedule.parse(text)


# Errors


@pytest.mark.parametrize(
    "rows, match",
    [
        (["0F0 0B0", "1F0"], "own: no worker runs 1B0; every microbatch has one F and one B"),
        (["0F0 0B0", "1F0 1F0 1B0"], "own: worker 1 runs 1F0 twice; it has to run once"),
        (["0F0 0B0", "1F0 1B0 2F0"], "2F0 is not .*: stages are 0 to 1, microbatches 0 to 0"),
        (["0F0 0B0", "1F0 1B0 1F1"], "1F1 is not one of its actions"),
        (["0F0 0B0", "1F0 1B0", ""], "own: worker 2 runs nothing; leave it out"),
        (["0F0 0B0 1F0", "1F0 1B0"], r"1F0 runs on workers \[0, 1\] and 1B0 on \[1\]"),
        (["0f0 0F0 0B0", "1F0 1B0"], "without gradient 1 times at stage 0 and 0 times at stage 1"),
        (["0f0.1 0F0 0B0", "1f0.1 1F0 1B0"], r"in passes \[1\]; passes count up from 0"),
    ],
)
def test_error_for_an_invalid_schedule_names_the_wrong_action(rows: list[str], match: str) -> None:
    with pytest.raises(ss.ScheduleError, match=match):
        own(*rows, stages=2, microbatches=1)


def test_workers_that_share_a_stage_must_run_the_same_microbatches() -> None:
    with pytest.raises(
        ss.ScheduleError, match=r"microbatch 0 on workers \[0, 1\] and .* 1 on \[1\]"
    ):
        own("0F0 0B0", "0F0 0B0 0F1 0B1", stages=1, microbatches=2)


def test_missing_action_of_huge_counts_is_found_at_once() -> None:
    with pytest.raises(ss.ScheduleError, match="no worker runs 0F1;"):
        own("0F0 0B0", stages=999_999_999, microbatches=999_999_999)


@pytest.mark.parametrize("name", ["", "two words", "line\n"])
def test_schedule_name_that_is_not_one_word_is_rejected(name: str) -> None:
    with pytest.raises(ss.ScheduleError, match="name is one word"):
        ss.Schedule(name, 1, 1, gpipe(1, 1).rows)


@pytest.mark.parametrize(
    "name, counts",
    [
        ("naive", (0, 1)),
        ("gpipe", (1, 0)),
        ("1f1b", (2, -1)),
        ("gpipe", (2.0, 1)),
        ("interleaved", (0, 1, 1)),
        ("interleaved", (1, 0, 1)),
        ("interleaved", (1, 1, 0)),
        ("chimera", (0, 2)),
        ("chimera", (2, 0)),
    ],
)
def test_generators_refuse_counts_below_one(name: str, counts: tuple[int, ...]) -> None:
    with pytest.raises(
        ss.ScheduleError, match=f"{name}: (num_.*|chunks) is an integer of at least 1, got"
    ):
        ss.SCHEDULES[name](*counts)


@pytest.mark.parametrize("d, n", [(3, 3), (1, 1)])
def test_chimera_rejects_an_odd_number_of_workers(d: int, n: int) -> None:
    with pytest.raises(ss.ScheduleError, match=f"chimera of {d} workers: it takes an even number"):
        ss.SCHEDULES["chimera"](d, n)


@pytest.mark.parametrize(
    "fields", [("G", 0, 0), ("F", -1, 0), ("B", 0, -1), ("f", 0, 0, -1), ("F", 0, 0, 1)]
)
def test_action_refuses_wrong_fields(fields: tuple[str, int, int]) -> None:
    with pytest.raises(ss.ScheduleError, match=r"kinds are F|count from 0|only f is run in passes"):
        Action(*fields)


@pytest.mark.parametrize("duration", [0, -1, 0.5, None])
def test_inexact_or_nonpositive_durations_are_rejected(duration: Any) -> None:
    with pytest.raises(ss.ScheduleError, match=r"duration of B at stage 0 is an int or a Fraction"):
        timeline(gpipe(1, 1), {"F": 1, "B": duration})


def test_edges_to_unknown_stages_are_rejected() -> None:
    with pytest.raises(ss.ScheduleError, match="edge 1 -> 2: schedule gpipe has stages 0 to 1"):
        timeline(gpipe(2, 1), edges=[(0, 1), (1, 2)])
