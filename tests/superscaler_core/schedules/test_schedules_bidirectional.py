"""Laws of V placements and pairs (ZB-V, DualPipe, DualPipeV), of ZB-H2 and of LoopedBFS."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest

from superscaler_core.published.chimera import chimera
from superscaler_core.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Generator,
    Schedule,
    ScheduleError,
    dualpipe,
    dualpipe_v,
    generate,
    gpipe,
    grid,
    interleaved,
    looped_bfs,
    one_f_one_b,
    recompute_apart,
    split_backward,
    timeline,
    zero_bubble_h2,
    zero_bubble_v,
)
from superscaler_core.schedules.timeline import Durations, Timeline
from tests.covering import covering
from tests.superscaler_core.schedule_rows import TWICE, own

COUNTS = [(1, 1), (1, 6), (2, 3), (2, 11), (3, 2), (3, 6), (5, 1), (5, 11)]
EVEN = [(2, 4), (4, 2), (4, 14), (6, 12)]


def spans_idle(times: Timeline) -> list[int | Fraction]:
    """Time in which each worker waits between its first and its last action."""
    return [
        row[-1].end - row[0].start - busy for row, busy in zip(times.rows, times.busy, strict=True)
    ]


# --- zero bubbles -------------------------------------------------------------------------------


@pytest.mark.parametrize("d, n, makespan", [(4, 8, 51), (8, 16, 103)])
def test_zero_bubble_v_has_the_figures_of_torch(d: int, n: int, makespan: int) -> None:
    """Figures of torch's ZBVZeroBubble at F = I = W: no idle time in spans, memory of 1F1B."""
    schedule = zero_bubble_v(d, n)
    times = timeline(schedule)
    assert times.makespan == makespan == 6 * n + d - 1
    assert times.bubble_of_span == 0
    assert spans_idle(times) == [0] * d
    assert schedule.peak_microbatches == (2 * d,) * d
    assert one_f_one_b(d, n).peak_microbatches[0] == d  # stages are twice as long here


@pytest.mark.parametrize("d, n", [(d, n) for d, n in COUNTS if n >= 2 * d - 1])
def test_workers_of_zero_bubble_v_and_h2_never_wait(d: int, n: int) -> None:
    for generator, work in ((zero_bubble_v, 6 * n), (zero_bubble_h2, 3 * n)):
        times = timeline(generator(d, n))
        assert spans_idle(times) == [0] * d
        assert times.makespan == work + d - 1


@covering(counts=[(2, 4), (3, 7), (4, 8)], f=(1, 2, 3), i=(1, 2, 3), w=(1, 2, 3))
def test_idle_time_of_zero_bubble_h2_equals_its_formula(
    counts: tuple[int, int], f: int, i: int, w: int
) -> None:
    """The idle time is ``(D - 1)(F + I - 2 W)`` if W is at most F and at most I.

    The formula was remembered from the paper and not checked. Its value 0 at F = I = W, and the
    memory, are in DeepSeek's comparison of schedules.
    """
    d, n = counts
    times = timeline(zero_bubble_h2(d, n), {"F": f, "I": i, "W": w})
    if w <= min(f, i):
        assert max(spans_idle(times)) == (d - 1) * (f + i - 2 * w)
    assert times.schedule.peak_microbatches == (min(n, 2 * d - 1),) * d


# --- pairs in time ------------------------------------------------------------------------------


def pair_times(f_and_b: int) -> Durations:
    return {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1, "F&B": f_and_b}


@pytest.mark.parametrize(
    "d, n, f_and_b, makespan, idle, peak",
    [
        (4, 8, 3, 26, [2] * 4, 5),
        (4, 8, 2, 22, [1] * 4, 5),
        (8, 20, 3, 66, [6] * 8, 9),
        (8, 20, 2, 52, [1, 2, 3, 3, 3, 3, 2, 1], 9),
        (8, 40, 3, 126, [6] * 8, 9),
    ],
)
def test_dualpipe_has_the_figures_of_its_authors_code(
    d: int, n: int, f_and_b: int, makespan: int, idle: list[int], peak: int
) -> None:
    """The figures are those of the steps in the authors' code."""
    schedule = dualpipe(d, n)
    times = timeline(schedule, pair_times(f_and_b))
    assert times.makespan == makespan
    assert [*times.idle] == idle
    assert max(idle) == (d // 2 - 1) * (f_and_b + 2 - 3)
    assert schedule.peak_microbatches == (peak,) * d == (d + 1,) * d


@pytest.mark.parametrize("d, n, makespan, idle, peak", [(4, 8, 54, 6, 9), (8, 16, 110, 14, 17)])
def test_makespan_idle_time_and_peak_of_dualpipe_v(
    d: int, n: int, makespan: int, idle: int, peak: int
) -> None:
    schedule = dualpipe_v(d, n)
    times = timeline(schedule, pair_times(3))
    assert (times.makespan, times.idle) == (makespan, (idle,) * d)
    assert idle == (2 * d // 2 - 1) * (3 + 2 - 3)
    assert schedule.peak_microbatches == (peak,) * d


@pytest.mark.parametrize("f_and_b", [2, 3])
@pytest.mark.parametrize("d, n", EVEN)
def test_dualpipe_v_is_half_of_dualpipe(d: int, n: int, f_and_b: int) -> None:
    """DualPipeV has the first half of the workers; microbatches of both directions are merged."""
    whole, half = dualpipe(d, n), dualpipe_v(d // 2, n // 2)
    for row, folded in zip(whole.rows, half.rows, strict=False):
        assert [(a.kind, a.stage, a.microbatch % (n // 2)) for a in row] == [
            (a.kind, a.stage, a.microbatch) for a in folded
        ]
    both = [timeline(one, pair_times(f_and_b)) for one in (whole, half)]
    assert both[0].makespan == both[1].makespan
    assert both[0].idle == (*both[1].idle, *both[1].idle[::-1])


@pytest.mark.parametrize("d, n", [(4, 8), (6, 12)])
def test_half_of_the_microbatches_of_dualpipe_go_in_each_direction(d: int, n: int) -> None:
    schedule = dualpipe(d, n)
    assert schedule.routes == chimera(d, d).routes
    assert [schedule.route_of(m) for m in range(n)] == [0] * (n // 2) + [1] * (n // 2)


def test_pair_without_a_duration_runs_one_action_after_the_other() -> None:
    schedule = own("0F0 0F1&0B0 0B1", stages=1, microbatches=2)
    assert schedule.partners == {
        Action.parse(one): Action.parse(other) for one, other in [("0F1", "0B0"), ("0B0", "0F1")]
    }
    alone, beside = (timeline(schedule, times) for times in (TWICE, {**TWICE, "F&B": 2}))
    assert [(span.start, span.end) for span in alone.rows[0]] == [(0, 1), (1, 2), (2, 4), (4, 6)]
    assert [(span.start, span.end) for span in beside.rows[0]] == [(0, 1), (1, 3), (1, 3), (3, 5)]
    assert (alone.busy, beside.busy) == ((6,), (5,))
    assert beside.idle == (0,)


def test_both_actions_of_a_pair_wait_for_the_inputs_of_either() -> None:
    schedule = own("0F0 0F1&0B0 0B1", "1F0 1B0 1F1 1B1", stages=2, microbatches=2)
    spans = timeline(schedule, {"F": 1, "B": 4, "F&B": 4}).spans
    assert spans[Action.parse("0F1")].start == spans[Action.parse("0B0")].start == 6


def test_a_pair_that_needs_itself_is_a_deadlock() -> None:
    """0B0 waits for 1B0, which comes after 1F1, which waits for 0F1, the partner of 0B0."""
    schedule = own("0F0 0F1&0B0 0B1", "1F0 1F1 1B0 1B1", stages=2, microbatches=2)
    assert timeline(schedule, TWICE).makespan > 0
    with pytest.raises(ScheduleError, match="wait for each other"):
        timeline(schedule, {**TWICE, "F&B": 2})


@pytest.mark.parametrize("time", [0, 0.5])
def test_inexact_or_nonpositive_duration_of_a_pair_is_rejected(time: float) -> None:
    with pytest.raises(ScheduleError, match=r"duration of F&B at stage . is an int or a Fraction"):
        timeline(dualpipe(2, 4), {**pair_times(2), "F&B": time})  # type: ignore[dict-item]


# --- pairs as texts -----------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [dualpipe, dualpipe_v, zero_bubble_v, zero_bubble_h2])
@pytest.mark.parametrize("d, n", EVEN[1:3])
def test_schedule_with_pairs_parses_back(generator: Generator, d: int, n: int) -> None:
    schedule = generator(d, n)
    for one in (schedule, split_backward(schedule), recompute_apart(schedule)):
        assert Schedule.parse(str(one)) == one
        assert len(one.pairs) == len(schedule.pairs) == str(one).count("&")
        assert timeline(one).makespan > 0


@pytest.mark.parametrize(
    "row, words",
    [
        ("0F0&0B0", "0F0&0B0 is no pair"),
        ("0F0 0F1 0B0&0B1", "0B0&0B1 is no pair"),
        ("0F0 0F1&0B0&0B1", "cannot parse line 2"),
        ("0F0 0F1& 0B0 0B1", "cannot parse action ''"),
    ],
)
def test_invalid_pairs_are_rejected(row: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        own(row, stages=1, microbatches=2 if "1" in row else 1)


def test_pair_of_nonadjacent_actions_is_rejected() -> None:
    pair = Action.parse("0F1"), Action.parse("0B0")
    with pytest.raises(ScheduleError, match="of pair 0F1&0B0 the second has to be right behind"):
        Schedule("own", 1, 2, naive_rows(), frozenset([pair]))


def naive_rows() -> tuple[tuple[Action, ...], ...]:
    return SCHEDULES["naive"](1, 2).rows


def test_grid_shows_a_pair_in_one_cell() -> None:
    assert grid(timeline(dualpipe(2, 4), pair_times(2))).splitlines()[2] == (
        "worker 0     0F0     1F2     0F1     1B2      .. 1F3&0B0      ..     1B3      ..     0I1"
        "     0W1"
    )


# --- any number of microbatches -----------------------------------------------------------------


@pytest.mark.parametrize("generator", [zero_bubble_v, dualpipe_v])
@pytest.mark.parametrize("d, n", COUNTS[::2])
def test_folded_pipelines_run_with_any_number_of_microbatches(
    generator: Generator, d: int, n: int
) -> None:
    schedule = generator(d, n)
    assert timeline(schedule, pair_times(2)).makespan > 0
    assert [schedule.stages_of(w) for w in range(d)] == [
        tuple(sorted({w, 2 * d - 1 - w})) for w in range(d)
    ]
    limit = 2 * d + (generator is dualpipe_v)
    assert max(schedule.peak_microbatches) <= min(limit, 2 * n)


@pytest.mark.parametrize("d, n", [(2, 1), (4, 2), (4, 3), (4, 6), (6, 8), (8, 21)])
def test_chimera_runs_any_number_of_microbatches(d: int, n: int) -> None:
    """A round that is not full takes as long as a full one, or less."""
    full = -(-n // d) * d
    assert timeline(chimera(d, n)).makespan <= timeline(chimera(d, full)).makespan
    ways = [chimera(d, n).route_of(m) for m in range(n)]
    assert abs(ways.count(0) - ways.count(1)) <= 1


@pytest.mark.parametrize("d, n", [(3, 6), (4, 7)])
def test_dualpipe_rejects_odd_numbers(d: int, n: int) -> None:
    with pytest.raises(ScheduleError, match=f"dualpipe of {d} workers and {n} microbatches: both"):
        dualpipe(d, n)


# --- LoopedBFS, and options of all schedules ----------------------------------------------------


@pytest.mark.parametrize("d, n, v", [(4, 8, 2), (4, 4, 3), (2, 6, 2), (8, 16, 2)])
def test_looped_bfs_takes_as_long_as_interleaved_and_holds_all_chunks(
    d: int, n: int, v: int
) -> None:
    schedule = looped_bfs(d, n, v)
    assert timeline(schedule, TWICE).makespan == timeline(interleaved(d, n, v), TWICE).makespan
    assert schedule.peak_microbatches == (v * n,) * d


@pytest.mark.parametrize("d, n", COUNTS)
def test_looped_bfs_with_one_chunk_is_gpipe(d: int, n: int) -> None:
    assert looped_bfs(d, n, 1).rows == gpipe(d, n).rows


@pytest.mark.parametrize(
    "name, halves, apart",
    [
        (name, number % 3 > 0, number % 3 < 2)
        for number, name in enumerate(SCHEDULES)
        if name not in ("interlaced", "nf1b")
    ],
)
def test_every_schedule_runs_with_split_backwards_and_separate_recomputation(
    name: str, halves: bool, apart: bool
) -> None:
    whole = SCHEDULES[name](4, 8)
    made = generate(SCHEDULES[name], 4, 8, halves=halves, apart=apart)
    kinds = {action.kind for action in made.places}
    assert (ActionKind.BACKWARD in kinds) == (not halves and "zero" not in name)
    assert (ActionKind.RECOMPUTE in kinds) == apart
    assert timeline(made, pair_times(3)).makespan > 0
    if not apart:
        split = {"F": 1, "I": 1, "W": 1, "B": 2}
        assert timeline(made, split).makespan <= timeline(whole, split).makespan
        assert made.peak_microbatches == whole.peak_microbatches


def test_only_interleaved_and_looped_bfs_accept_chunks() -> None:
    assert generate(interleaved, 2, 4, chunks=2) == interleaved(2, 4, 2)
    with pytest.raises(ScheduleError, match="gpipe with chunks=2: only interleaved and looped_bfs"):
        generate(gpipe, 2, 4, chunks=2)


# --- rows of torch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, generator, d, n, num_chunks",
    [
        ("ZBVZeroBubble", zero_bubble_v, 2, 4, 2), ("ZBVZeroBubble", zero_bubble_v, 5, 11, 2),
        ("DualPipeV", dualpipe_v, 4, 12, 2), ("DualPipeV", dualpipe_v, 5, 11, 2),
        ("Interleaved1F1B", interleaved, 4, 8, 2), ("Interleaved1F1B", interleaved, 8, 16, 2),
        ("Interleaved1F1B", interleaved, 4, 10, 3), ("Interleaved1F1B", interleaved, 5, 2, 3),
    ],
)  # fmt: skip
def test_rows_equal_those_of_torch(
    name: str, generator: Callable[..., Schedule], d: int, n: int, num_chunks: int
) -> None:
    """Torch's generators need few attributes of stages."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    same = {"group_size": d, "group_rank": 0, "num_stages": num_chunks * d, "submod": None}
    is_v = generator is not interleaved
    stages = [
        SimpleNamespace(
            stage_index=index, is_first=index == 0, is_last=index == num_chunks * d - 1,
            device="cpu", has_backward=True, group=None, **same,
        )
        for index in ((0, 2 * d - 1) if is_v else range(0, num_chunks * d, d))
    ]  # fmt: skip
    order = pipelining.get_schedule_class(name)(stages, n, loss_fn=lambda: None).pipeline_order
    torchs = [
        [
            str(one)
            for action in order[rank]
            if action is not None
            for one in (action.sub_actions or (action,))
        ]
        for rank in range(d)
    ]
    made = generator(d, n) if is_v else generator(d, n, num_chunks)
    assert [[*map(str, row)] for row in made.rows] == torchs
