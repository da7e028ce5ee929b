"""Interlaced pipeline: its schedule, and the plan that runs it."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest

import superscaler_core as ss
from superscaler_core.plans import PLANS
from superscaler_core.schedules import Action, interlaced, interlaced_edges, one_f_one_b, timeline
from tests.superscaler_core.cases import Case
from tests.superscaler_core.schedule_rows import TWICE

# S, N, number of embeddings.
SIZES = [
    (1, 2, 1), (2, 9, 1), (3, 1, 1), (4, 5, 1), (2, 1, 2),
    (4, 2, 2), (8, 9, 2), (3, 5, 3), (9, 2, 3), (12, 9, 3),
]  # fmt: skip

STEPS = """\
0 encF0 | F0 --|-- F0|-- --|-- --
1 encF1 decF0 | F1 --|-- F1|F0 --|-- F0
2 encF2 decF1 | F2 --|-- F2|F1 B0|B0 F1 | decB0
3 encF3 decF2 | F3 B0|B0 F3|F2 B1|B1 F2 | decB1 encB0
4 decF3 | -- B1|B1 --|F3 B2|B2 F3 | decB2 encB1
5 | -- B2|B2 --|-- B3|B3 -- | decB3 encB2
6 | -- B3|B3 --|-- --|-- -- | encB3"""
"""Output of SuperScaler's public code for four workers and four microbatches. A line is a step: the
embeddings before it, the first and the second half of every worker, the embeddings after it."""


def steps_of(schedule: ss.Schedule) -> str:
    """The timeline of a schedule of an encoder and a decoder, in the form of ``STEPS``."""
    num = schedule.num_workers
    times = timeline(schedule, edges=interlaced_edges(num))
    names = {0: "enc", num // 2 + 1: "dec"}
    now: dict[int, dict[int, Action]] = {}
    for worker, row in enumerate(times.rows):
        for span in row:
            now.setdefault(int(span.start), {})[worker] = span.action
    lines: list[tuple[list[str], list[list[str]], list[str]]] = [([], [], [])]
    for _, running in sorted(now.items()):
        before, turns, after = lines[-1]
        action = next(iter(running.values()))
        is_embedding = action.stage in names
        starts = action.kind == "F" if is_embedding else len(turns) == 2
        if (starts and (turns or after)) or (after and not is_embedding):
            before, turns, after = [], [], []
            lines.append((before, turns, after))
        if is_embedding:
            assert running == dict.fromkeys(range(num), action)
            (after if turns else before).append(names[action.stage] + action.brief)
        else:
            turns.append([running[w].brief if w in running else "--" for w in range(num)])
    return "\n".join(
        " ".join([str(i), *before, "|", "|".join(map(" ".join, zip(*turns, strict=True)))])
        + (f" | {' '.join(after)}" if after else "")
        for i, (before, turns, after) in enumerate(lines)
    )


def embeddings_of(num_workers: int, num_embeddings: int) -> list[int]:
    """The stages of embeddings, which read no other stage."""
    edges = interlaced_edges(num_workers, num_embeddings)
    return sorted({*range(num_workers + num_embeddings)} - {reader for _, reader in edges})


# --- the schedule -------------------------------------------------------------------------------


def test_schedule_of_four_workers_equals_the_table_of_superscaler() -> None:
    assert steps_of(interlaced(4, 4)) == STEPS


@pytest.mark.parametrize("s, n", [(2, 3), (4, 1), (4, 9), (8, 8), (8, 2), (12, 5)])
def test_schedule_has_microbatches_plus_workers_minus_one_steps(s: int, n: int) -> None:
    assert len(steps_of(interlaced(s, n)).splitlines()) == n + s - 1


@pytest.mark.parametrize("s, n, t", SIZES)
def test_schedule_without_its_embeddings_equals_1f1b(s: int, n: int, t: int) -> None:
    embeddings = embeddings_of(s, t)
    rows = interlaced(s, n, t).rows
    layers = [[a.brief for a in row if a.stage not in embeddings] for row in rows]
    assert layers == [[action.brief for action in row] for row in one_f_one_b(s, n).rows]


@pytest.mark.parametrize("s, peaks", [(4, [4, 3, 2, 1]), (8, [8, 7, 6, 5, 4, 3, 2, 1])])
def test_workers_hold_as_many_microbatches_of_their_layers_as_in_1f1b(
    s: int, peaks: list[int]
) -> None:
    held = {"F": 1, "B": -1}
    embeddings = embeddings_of(s, 2)
    found = [
        max(accumulate(held[a.kind] for a in row if a.stage not in embeddings))
        for row in interlaced(s, s).rows
    ]
    assert found == peaks


@pytest.mark.parametrize("s, n, t", SIZES)
def test_all_workers_run_all_embeddings_in_the_same_order(s: int, n: int, t: int) -> None:
    schedule = interlaced(s, n, t)
    everyone = tuple(range(s))
    assert all(schedule.workers_of(stage) == everyone for stage in embeddings_of(s, t))
    orders = [[a for a in row if a.stage in embeddings_of(s, t)] for row in schedule.rows]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("s, n, t", [*SIZES, (4, 4, 1)])
def test_makespan_is_that_of_1f1b_plus_the_embeddings(s: int, n: int, t: int) -> None:
    """nnScaler's general form has the same makespan, such as 22 for (4, 4, 1)."""
    times = timeline(interlaced(s, n, t), edges=interlaced_edges(s, t))
    assert times.makespan == 2 * (n + s - 1) + 2 * n * t
    assert timeline(one_f_one_b(s, n)).makespan == 2 * (n + s - 1)


@pytest.mark.parametrize("s", [2, 4, 6, 8])
def test_one_more_microbatch_adds_two_backwards_and_the_embeddings(s: int) -> None:
    """In 1F1B, whose workers do not wait for all others, it adds a forward and a backward."""
    edges = interlaced_edges(s)
    times = [timeline(interlaced(s, 2 * s + i), TWICE, edges).makespan for i in (0, 1)]
    straight = [timeline(one_f_one_b(s, 2 * s + i), TWICE).makespan for i in (0, 1)]
    assert times[1] - times[0] == 2 * TWICE["B"] + 2 * (TWICE["F"] + TWICE["B"])
    assert straight[1] - straight[0] == TWICE["F"] + TWICE["B"]


@pytest.mark.parametrize("slack", [1, 5])
@pytest.mark.parametrize("s, n", [(2, 1), (6, 3), (8, 12)])
def test_slack_moves_only_the_embeddings(s: int, n: int, slack: int) -> None:
    made, loose = interlaced(s, n), interlaced(s, n, slack=slack)
    assert timeline(loose, edges=interlaced_edges(s)).makespan >= 2 * (n + s - 1)
    for row, moved in zip(made.rows, loose.rows, strict=True):
        assert sorted(row) == sorted(moved)
        layers = [[a for a in r if a.stage not in (0, s // 2 + 1)] for r in (row, moved)]
        assert layers[0] == layers[1]


def test_slack_speeds_up_the_simulated_step_by_at_least_20_percent() -> None:
    sizes = {"layers": 4, "width": 512, "heads": 8, "sequence": 128, "target_sequence": 128}
    secs = []
    for slack in (0, 1):
        case = Case("interlaced", 8, {"microbatches": 24, "slack": slack}, "mbart", sizes)
        secs.append(ss.simulate(case.compiled(), "v100").secs)
    # A step of 1F1B takes 3 units. A step with a barrier of all devices takes 4 units.
    assert 1.2 < secs[0] / secs[1] < 4 / 3


@pytest.mark.parametrize(("apart", "units"), [(False, 6), (True, 4)])
@pytest.mark.parametrize("s", [2, 4, 8])
def test_separate_recomputation_cuts_time_per_microbatch_from_6_to_4_units(
    s: int, *, apart: bool, units: int
) -> None:
    """One more microbatch adds two halves of 3 units (B with its R) or 2 units (F and R, or B)."""
    # The embeddings take almost no time.
    few = {(kind, stage): Fraction(1, 10**6) for kind in "FB" for stage in embeddings_of(s, 2)}
    durations = {"F": 1, "R": 1, "B": 2 if apart else 3, **few}
    spans = [
        timeline(interlaced(s, n, apart=apart), durations, interlaced_edges(s)).makespan
        for n in (2 * s, 2 * s + 10)
    ]
    assert float(spans[1] - spans[0]) == pytest.approx(10 * units, rel=1e-3)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((3, 4), "each of 2 embeddings is in front of as many of the 3 workers'.* multiple of 2"),
        ((4, 4, 3), "multiple of 3 workers"),
        ((0, 4), "num_workers is an integer of at least 1, got 0"),
        ((4, 0), "num_microbatches is an integer of at least 1, got 0"),
        ((4, 4, 0), "num_embeddings is an integer of at least 1, got 0"),
        ((4, 4, 1, -1), "at least 0, got -1"),
    ],
)
def test_invalid_counts_raise_schedule_error(counts: tuple[int, ...], words: str) -> None:
    with pytest.raises(ss.ScheduleError, match=words):
        interlaced(*counts)


# --- the plan -----------------------------------------------------------------------------------


def case(num_devices: int, *, layers: int = 2, **options: object) -> Case:
    """The plan on an mBART with ``layers`` layers on each side."""
    sizes = {"layers": layers, "heads": 8}
    options = {"microbatches": 2, **options}
    return Case("interlaced", num_devices, options, model="mbart", sizes=sizes, batch=2)


@pytest.mark.parametrize("made", [case(2), case(4), case(8, tp=2), case(8, layers=4)], ids=str)
def test_stage_graph_equals_the_edges_of_the_schedule(made: Case) -> None:
    compiled = made.compiled()
    schedule = compiled.plan.schedule
    assert schedule is not None
    assert compiled.materialized.edges.stage_graph == interlaced_edges(schedule.num_workers)


@pytest.mark.parametrize("tp", [1, 2])
def test_embeddings_are_on_all_devices_and_layers_on_one_group(tp: int) -> None:
    made = case(4 * tp, tp=tp).compiled()
    devices = made.materialized.stage_devices
    groups = [frozenset(range(tp * i, tp * i + tp)) for i in range(4)]
    everyone = frozenset(range(4 * tp))
    assert devices == (everyone, *groups[:2], everyone, *groups[2:])


@pytest.mark.parametrize(("rows", "shape"), [(False, (40, 4)), (True, (10, 16))])
def test_every_device_stores_a_distinct_share_of_the_embedding(
    rows: bool, shape: tuple[int, int]
) -> None:
    weights = case(4, rows=rows).compiled().materialized.weights
    embedding = next(t for t in weights.storage if t.name == "embed.weight")
    shards = weights.storage[embedding].shards
    assert [shard.box.shape for shard in shards.values()] == [shape] * 4
    assert len({shard.box for shard in shards.values()}) == 4
    (use,) = (use for use in weights.uses if use.tensor is embedding)
    assert use.is_stored
    assert len(use.readers) == 2


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (case(3),
         r"tp=1 on 3 devices: .* each of 2 look-ups in 'embed.weight'.* multiple of 2 \* tp"),
        (case(4, tp=0), "tp is at least 1"),
        (case(4, tp=4), "tp=4 on 4 devices"),
        (case(8), r"4 stages of the 2 blocks behind embed:embedding: .* larger tp"),
    ],
    ids=str,
)  # fmt: skip
def test_infeasible_interlaced_plan_raises_plan_error(made: Case, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        made.compiled()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embed", "has no parameter 'embed'; it has embed.weight"),
        ("classify.weight",
         r"no op before its last block that reads 'classify.weight'; say find_blocks"),
    ],
)  # fmt: skip
def test_explicit_embedding_that_is_no_embedding_raises_plan_error(name: str, words: str) -> None:
    graph = case(4).compiled().plan.graph
    plan = ss.Plan(graph, range(4))
    plan.blocks = ss.find_blocks(graph, embedding=name)
    with pytest.raises(ss.PlanError, match=words):
        PLANS["interlaced"](plan)
