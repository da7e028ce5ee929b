"""Laws of paths: their steps have kinds and groups, consist of exchanges, and print as a table."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.planning.path import State, exchange_step, groups_text
from tests.oracle import all_pairs
from tests.planning.test_primitives import KINDS

HOST = rv.Topology.single_host(8, 0, 1.0)
SHAPE = (16, 24)


def plan_of(src: str, dst: str, shape: tuple[int, ...] = SHAPE) -> rv.Plan:
    return rv.plan(rv.Layout(shape, src), rv.Layout(shape, dst), topology=HOST)


# --- steps --------------------------------------------------------------------------------------


def test_kinds_of_all_steps_are_known() -> None:
    plans = [rv.plan(*pair, topology=HOST) for pair in all_pairs(SHAPE, 8)]
    assert {step.kind for plan in plans for step in plan.path.steps} <= KINDS


def test_groups_of_every_step_are_disjoint_and_ascend() -> None:
    wrong = []
    for pair in all_pairs(SHAPE, 8):
        for step in rv.plan(*pair, topology=HOST).path.steps:
            ranks = [rank for group in step.groups for rank in group]
            ascends = all(list(group) == sorted(group) for group in step.groups)
            if len(set(ranks)) != len(ranks) or not ascends:
                wrong.append(f"{step.kind} {step.groups}")
    assert wrong == []


def test_scatter_and_gather_of_one_group_are_one_all_reduce() -> None:
    (step,) = plan_of("R(1)V(4)D(2,1)", "R(4)V(1)D(2,1)").path.steps
    assert (step.kind, step.groups) == ("all_reduce", ((0, 2, 4, 6), (1, 3, 5, 7)))


def test_all_reduce_has_two_legs_through_its_middle_state() -> None:
    (step,) = plan_of("R(1)V(4)D(2,1)", "R(4)V(1)D(2,1)").path.steps
    assert step.step_exchanges == ((step.src, step.middle), (step.middle, step.dst))


@pytest.mark.parametrize(
    "ranks, kind",
    [([0, 1], "exchange"), ([1, 2], "exchange"), ([2, 3], "transfer")],
    ids=["same", "overlapping", "disjoint"],
)
def test_exchange_between_disjoint_ranks_is_a_transfer(ranks: list[int], kind: str) -> None:
    src, dst = rv.Layout((6,), "R(1)V(1)D(2)"), rv.Layout((6,), "R(2)V(1)D(1)", ranks=ranks)
    step = exchange_step(State(src), State(dst))
    assert (step.kind, step.groups) == (kind, (tuple(sorted({0, 1, *ranks})),))


def test_ranks_of_a_path_are_those_of_both_ends() -> None:
    src, dst = rv.Layout((6,), "R(1)V(1)D(2)", [5, 1]), rv.Layout((6,), "R(2)V(1)D(1)", [7, 5])
    assert rv.plan(src, dst, topology=HOST).path.ranks == (1, 5, 7)


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups, text",
    [
        (((0, 1, 2, 3),), "(0:4)"),
        (((0, 4), (1, 5)), "2x(0,4)"),
        (((0, 1, 2), (3, 4, 5), (6, 7, 8)), "3x(0:3)"),
    ],
)
def test_groups_text_shows_the_number_of_groups_and_the_first_one(
    groups: tuple[tuple[int, ...], ...], text: str
) -> None:
    assert groups_text(groups) == text


def test_path_prints_as_a_table() -> None:
    assert str(plan_of("R(1)V(1)D(2,4)", "R(2)V(1)D(1,4)").path).splitlines() == [
        "step  primitive   groups   layout",
        "                           R(1)V(1)D(2,4) on 0:8",
        "0     all_gather  4x(0,4)  R(2)V(1)D(1,4) on 0:8",
    ]


def test_table_shows_one_note_per_step() -> None:
    lines = plan_of("R(1)V(1)D(2,4)", "R(2)V(1)D(1,4)").path.table(["dear"])
    assert [line.split()[-1] for line in lines] == ["cost", "0:8", "dear"]


def test_table_names_the_number_of_windows() -> None:
    src, dst = rv.Layout((6,), "R(1)V(1)D(2)"), rv.Layout((6,), "R(2)V(1)D(1)")
    step = exchange_step(State(src), State(dst), num_slices=4)
    assert "exchange /4" in str(rv.Path(src, dst, (step,)))
