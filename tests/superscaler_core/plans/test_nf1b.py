"""nF1B: recycling passes between the forwards and backwards of 1F1B."""

from __future__ import annotations

import re

import pytest

import superscaler_core as ss
from superscaler_core.program import P2PSend
from superscaler_core.schedules import Schedule, ScheduleError, nf1b, one_f_one_b, timeline
from tests.covering import covering
from tests.superscaler_core.cases import Case

# --- the schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "row"),
    [
        (0, "f f f f f F0 f f F1 f f F2 f f F3 B0 f F4 B1 F5 B2 B3 B4 B5"),
        (3, "f f f f f F0 B0 f f F1 B1 f f F2 B2 f f F3 B3 f F4 B4 F5 B5"),
    ],
)
def test_rows_of_3f1b_are_those_of_superscaler(worker: int, row: str) -> None:
    """Its code, run for 4 stages and 6 microbatches, does not number forwards without gradient."""
    found = (re.sub(r"f[0-9.]+", "f", action.brief) for action in nf1b(4, 6, 2).rows[worker])
    assert " ".join(found) == row


@covering(d=(1, 2, 3, 8), more=(0, 1, 6), recycle=(0, 1, 2, 4))
def test_nf1b_has_no_deadlock_and_the_peak_microbatches_of_1f1b(
    d: int, more: int, recycle: int
) -> None:
    """A timeline exists only if the last stage's turn can reach the first stage: no deadlock."""
    n = d + more
    schedule = nf1b(d, n, recycle)
    times = timeline(schedule)
    assert times.busy == (n * (recycle + 2),) * d
    assert times.peak_microbatches == one_f_one_b(d, n).peak_microbatches
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(("d", "n"), [(1, 1), (2, 5), (4, 4), (6, 9)])
def test_nf1b_without_recycling_equals_1f1b(d: int, n: int) -> None:
    assert nf1b(d, n, 0).rows == one_f_one_b(d, n).rows


@pytest.mark.parametrize(
    ("recycle", "d"), [(1, 2), (1, 4), (1, 5), (2, 5), (2, 6), (3, 6), (3, 7), (4, 7), (4, 8)]
)
def test_full_pipeline_never_waits_if_stages_are_at_most_recycle_plus_three(
    recycle: int, d: int
) -> None:
    few, many = (timeline(nf1b(d, n, recycle)).idle for n in (20, 30))
    assert (few == many) == (d <= recycle + 3)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((4, 3, 2), "3 microbatches through 4 stages; it takes at least 4"),
        ((2, 2, -1), "recycle is 0 or more, got -1"),
        ((0, 2, 1), "num_stages is an integer of at least 1, got 0"),
    ],
)
def test_invalid_counts_of_nf1b_raise_schedule_error(
    counts: tuple[int, int, int], words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        nf1b(*counts)


# --- the plan -----------------------------------------------------------------------------------


def test_recycled_tensors_go_from_last_to_first_stage_once_per_turn() -> None:
    made = Case("nf1b", 2, {"microbatches": 3, "recycle": 4}, model="evoformer").compiled()
    sent = [event for event in made.materialized.events if isinstance(event, P2PSend)]
    edges = {event.name: made.materialized.edge(event.name) for event in sent}
    back = [e for e in sent if edges[e.name].recycles is not None]
    assert {(edges[e.name].src_stage, edges[e.name].dst_stage) for e in back} == {(1, 0)}
    assert len(back) == 2 * 4 * 3  # alignment and pairs, passes, microbatches
    onward = [e for e in sent if edges[e.name].recycles is None]
    assert len([e for e in onward if not e.is_back]) == 2 * (4 + 1) * 3
    assert len([e for e in onward if e.is_back]) == 2 * 3


def test_turns_without_gradient_keep_no_activations() -> None:
    once, often = (
        Case("nf1b", 2, {"microbatches": 2, "recycle": passes}, model="evoformer").compiled()
        for passes in (0, 3)
    )
    kept = [[m.activations_bytes for m in made.memory.values()] for made in (once, often)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("nf1b", 2, {"microbatches": 1}, model="evoformer"), "it takes at least 2"),
        (Case("nf1b", 2, {"pp": 1, "dp": 3}, model="evoformer"), "pp=1 times dp=3 on 2 devices"),
        (Case("nf1b", 2), "GPT recycles nothing"),
    ],
    ids=str,
)
def test_infeasible_nf1b_plan_raises_an_error(case: Case, words: str) -> None:
    with pytest.raises((ss.PlanError, ScheduleError), match=words):
        case.compiled()
