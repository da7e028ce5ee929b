"""Laws of backwards in halves (I and W), and of separate recomputations (R)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import chain, combinations, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import superscaler_core as ss
from superscaler_core.schedules import (
    Action,
    ActionKind,
    gpipe,
    grid,
    interlaced,
    interlaced_edges,
    interleaved,
    one_f_one_b,
    recompute_apart,
    split_backward,
    timeline,
    zero_bubble,
)
from superscaler_core.schedules.timeline import Durations, Time
from tests.covering import covering
from tests.superscaler_core.schedule_rows import SMALL, longest_path, own

ONES: Durations = {"F": 1, "I": 1, "W": 1, "B": 2, "R": 1}


def row_of(*kinds: str, stage: int = 0) -> tuple[Action, ...]:
    """Actions of a stage and microbatch 0."""
    return tuple(Action(ActionKind(kind), stage, 0) for kind in kinds)


# --- actions of a microbatch --------------------------------------------------------------------

COMPLETE = {frozenset(kinds) for kinds in ("FB", "FIW", "FRB", "FRIW")}


@cache
def makespan(*rows: str) -> Time | None:
    """The makespan of rows of kinds, one for each stage; None if they wait for each other."""
    own_rows = tuple(row_of(*kinds, stage=stage) for stage, kinds in enumerate(rows))
    try:
        return timeline(ss.Schedule("own", len(rows), 1, own_rows)).makespan
    except ss.ScheduleError as error:
        if "actions wait for each other" not in str(error):
            raise
        return None


def is_complete(kinds: Iterable[str]) -> bool:
    """Whether a schedule of a microbatch with these kinds of actions exists."""
    row = row_of(*kinds)
    try:
        return ss.Schedule("own", 1, 1, (row,)).rows == (row,)
    except ss.ScheduleError as error:
        if not re.search("no worker runs 0|are both run; B is I and W", str(error)):
            raise
        return False


def test_a_microbatch_has_a_whole_backward_or_both_halves() -> None:
    every = chain.from_iterable(combinations("FBIWR", n) for n in range(1, 6))
    assert {frozenset(kinds) for kinds in every if is_complete(kinds)} == COMPLETE


@pytest.mark.parametrize("kinds", ["FIW", "FRB", "FRIW"])
def test_only_one_order_of_a_microbatchs_actions_runs(kinds: str) -> None:
    every = [*map("".join, permutations(kinds))]
    assert {order: makespan(order) for order in every if makespan(order)} == {kinds: len(kinds)}


def test_all_orders_of_two_stages_except_one_are_a_deadlock() -> None:
    every = [*product(map("".join, permutations("FIW")), repeat=2)]
    assert {rows: makespan(*rows) for rows in every if makespan(*rows)} == {("FIW", "FIW"): 5}


def test_deadlock_error_names_the_halves_that_wait_for_each_other() -> None:
    with pytest.raises(
        ss.ScheduleError, match=r"0W0 for 0I0 \(its data\), 0I0 for 0W0 \(worker 0 runs"
    ):
        timeline(own("0F0 0W0 0I0", stages=1, microbatches=1))


# --- times of actions ---------------------------------------------------------------------------


def test_weight_half_of_a_stage_does_not_delay_other_stages() -> None:
    """Stage 1 runs its W late. Stage 0 runs its I as soon as the I of stage 1 ends."""
    schedule = own("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1", stages=2, microbatches=2)
    spans = timeline(schedule).spans
    assert spans[Action.parse("1I0")].start == 2
    assert spans[Action.parse("0I0")].start == 3
    assert spans[Action.parse("1W0")].start == 5


def test_split_and_whole_backwards_can_be_mixed_across_stages() -> None:
    schedule = own("0F0 0B0", "1F0 1I0 1W0", stages=2, microbatches=1)
    assert timeline(schedule, ONES).spans[Action.parse("0B0")].start == 3
    schedule = own("0F0 0I0 0W0", "1F0 1B0", stages=2, microbatches=1)
    assert timeline(schedule, ONES).spans[Action.parse("0I0")].start == 4


def test_recomputation_fills_the_wait_for_a_gradient() -> None:
    """With the recomputation inside B, the step takes 2 + 3 + 3.

    A separate recomputation runs during the B of the next stage, and adds no time.
    """
    inside = timeline(one_f_one_b(2, 1), {"F": 1, "B": 3})
    apart = timeline(recompute_apart(one_f_one_b(2, 1), stages=[0]),
                     {"F": 1, ("B", 0): 2, ("B", 1): 3, "R": 1})  # fmt: skip
    assert (inside.makespan, apart.makespan) == (8, 7)


def test_activations_are_held_from_forward_or_recomputation_to_b_or_w() -> None:
    rows = {
        "0F0 0F1 0B0 0B1": 2,
        "0F0 0F1 0I0 0I1 0W0 0W1": 2,
        "0F0 0I0 0F1 0I1 0W0 0W1": 2,
        "0F0 0I0 0W0 0F1 0I1 0W1": 1,
        "0F0 0F1 0R0 0B0 0R1 0B1": 1,
        "0F0 0F1 0R0 0R1 0I0 0W0 0I1 0W1": 2,
    }
    found = {row: own(row, stages=1, microbatches=2).peak_microbatches[0] for row in rows}
    assert found == rows


TIMES = st.fractions(Fraction(1, 4), 5, max_denominator=4)


@given(
    st.sampled_from([s for s in SMALL if s.num_stages * s.num_microbatches <= 12]),
    st.integers(0, 3),
    st.sets(st.integers(0, 1)),
    st.tuples(TIMES, TIMES, TIMES, TIMES),
)
def test_makespan_of_halves_and_recomputations_is_the_longest_path(
    schedule: ss.Schedule, delay: int, again: set[int], times: tuple[Time, ...]
) -> None:
    stages = [stage for stage in again if stage < schedule.num_stages]
    changed = recompute_apart(split_backward(schedule, delay), stages)
    durations = dict(zip("FIWR", times, strict=True))
    found = timeline(changed, durations).makespan
    assert found == longest_path(changed, lambda action: durations[action.kind])


# --- rewrites -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 5])
@pytest.mark.parametrize(
    "schedule", SMALL, ids=lambda s: f"{s.name}-{s.num_stages}-{s.num_microbatches}"
)
def test_split_schedule_keeps_the_original_order_and_is_not_slower(
    schedule: ss.Schedule, delay: int
) -> None:
    split = split_backward(schedule, delay)
    assert ss.Schedule.parse(str(split)) == split
    for row, before in zip(split.rows, schedule.rows, strict=True):
        kept = [action for action in row if action.kind is not ActionKind.WEIGHTS]
        assert [str(action).replace("I", "B") for action in kept] == [*map(str, before)]
    assert timeline(split, ONES).makespan <= timeline(schedule, ONES).makespan
    more = zip(split.peak_microbatches, schedule.peak_microbatches, strict=True)
    assert all(peak <= before + delay for peak, before in more)


@pytest.mark.parametrize(
    "schedule", SMALL[::2], ids=lambda s: f"{s.name}-{s.num_stages}-{s.num_microbatches}"
)
def test_recomputations_hold_one_microbatch_and_keep_the_order(schedule: ss.Schedule) -> None:
    apart = recompute_apart(schedule)
    assert ss.Schedule.parse(str(apart)) == apart
    assert apart.peak_microbatches == (1,) * schedule.num_workers
    for row, before in zip(apart.rows, schedule.rows, strict=True):
        assert tuple(action for action in row if action.kind is not ActionKind.RECOMPUTE) == before
    assert timeline(apart, ONES).makespan <= timeline(schedule, {"F": 1, "B": 3}).makespan


def test_repeated_rewrites_change_nothing() -> None:
    twice = split_backward(split_backward(gpipe(2, 2), 1), 1)
    assert twice.rows == split_backward(gpipe(2, 2), 1).rows
    again = recompute_apart(recompute_apart(gpipe(2, 2), [1]))
    assert again.rows == recompute_apart(gpipe(2, 2)).rows
    assert recompute_apart(gpipe(2, 2), ()).rows == gpipe(2, 2).rows


def test_stages_shared_by_several_workers_can_be_split() -> None:
    split = recompute_apart(split_backward(interlaced(4, 3)))
    edges = interlaced_edges(4)
    assert timeline(split, {**ONES, "R": Fraction(1, 100)}, edges).makespan > 0
    assert split.workers_of(0) == (0, 1, 2, 3)


@pytest.mark.parametrize("delay", [-1, lambda worker: -worker])
def test_a_delay_below_zero_is_refused(delay: int) -> None:
    with pytest.raises(ss.ScheduleError, match="a delay is 0 or more, got -1"):
        split_backward(gpipe(2, 2), delay)


def test_unknown_stage_is_rejected() -> None:
    with pytest.raises(ss.ScheduleError, match=r"stages \[2\]; schedule gpipe has stages 0 to 1"):
        recompute_apart(gpipe(2, 2), [2])


# --- zero bubble --------------------------------------------------------------------------------


@covering(
    counts=[(1, 1), (1, 9), (2, 2), (2, 3), (3, 6), (3, 9), (4, 4), (4, 5), (4, 9)],
    f=(1, 2, 3), i=(1, 2, 3), w=(1, 2, 3),
)  # fmt: skip
def test_idle_time_of_zero_bubble_equals_the_published_formula(
    counts: tuple[int, int], f: int, i: int, w: int
) -> None:
    """Idle time is ``(D - 1)(F + I - W)`` if W <= min(F, I); for 1F1B, ``(D - 1)(F + I + W)``."""
    d, n = counts
    times = timeline(zero_bubble(d, n), {"F": f, "I": i, "W": w})
    idle = times.makespan - n * (f + i + w)
    assert idle >= (d - 1) * (f + i - w)
    if w <= min(f, i):
        assert idle == (d - 1) * (f + i - w)
    whole = timeline(one_f_one_b(d, n), {"F": f, "B": i + w})
    assert whole.makespan - n * (f + i + w) == (d - 1) * (f + i + w)


@pytest.mark.parametrize("d, n", [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_every_worker_of_zero_bubble_holds_as_much_as_the_first_of_1f1b(d: int, n: int) -> None:
    assert zero_bubble(d, n).peak_microbatches == (one_f_one_b(d, n).peak_microbatches[0],) * d


def test_h2_written_by_hand_leaves_no_worker_idle_inside_its_span() -> None:
    """ZB-H2 for two stages: there are more warm-up forwards, and waiting I's run before W's."""
    schedule = own(
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
        stages=2,
        microbatches=3,
    )
    times = timeline(schedule)
    assert times.bubble_of_span == 0
    assert times.peak_microbatches == (3, 3)


def test_split_interleaved_takes_as_long_as_that_of_torch() -> None:
    """If W directly follows I, the idle time is ``(D - 1)(F + I)`` of a chunk.

    With late W's, the makespan is that of torch's InterleavedZeroBubble.
    """
    d, n, v = 4, 8, 2
    whole = timeline(split_backward(interleaved(d, n, v)), ONES)
    assert whole.makespan - 3 * n * v == (d - 1) * 2
    late = timeline(split_backward(interleaved(d, n, v), lambda worker: worker), ONES)
    assert late.makespan == 51


def test_grid_shows_both_halves_of_backwards() -> None:
    assert grid(zero_bubble(2, 3)).splitlines() == [
        "zero-bubble: makespan 10, idle 1/10 of it, peak microbatches 2 2",
        "time      0  1  2  3  4  5  6  7  8  9",
        "worker 0 F0 F1 -- I0 W0 F2 I1 W1 I2 W2",
        "worker 1 -- F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
