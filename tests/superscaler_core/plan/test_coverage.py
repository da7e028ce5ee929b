from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.plan import check_assigned, check_coverage
from tests.superscaler_core.small import on_one, two_linears


def planned(*ranges: dict[str, tuple[int, int]]) -> ss.Plan:
    plan = ss.Plan(two_linears(), range(4))
    plan.op_trans(plan.graph.ops[0], ss.pieces(*ranges))
    return on_one(plan)


@pytest.mark.parametrize(
    "ranges",
    [
        [{"b": (0, 1)}, {"b": (1, 4)}],
        [{"b": (0, 2), "n": (0, 8)}, {"b": (2, 4), "n": (0, 3)}, {"b": (2, 4), "n": (3, 8)}],
        [{"b": (0, 4)}, {"b": (0, 4)}],  # replicas do the same work
        [{"k": (0, 2)}, {"k": (2, 6)}],
    ],
)
def test_pieces_that_tile_the_work_are_accepted(ranges: list[dict[str, tuple[int, int]]]) -> None:
    check_coverage(planned(*ranges))


@pytest.mark.parametrize(
    "ranges, match",
    [
        ([{"b": (0, 3)}, {"b": (2, 4)}],
         r"two parts of up:linear \(b k\+, n k\+ -> b n\) do the same work: b\[0:3\] and b\[2:4\] "
         r"overlap in b\[2:3\]; cut them at one point, or replicate"),
        ([{"b": (0, 3)}], r"no part of up:linear computes b\[3:4\]"),
        ([{"b": (0, 2), "n": (0, 4)}, {"b": (2, 4)}], r"no part .* computes b\[0:2\], n\[4:8\]"),
        ([{"k": (0, 4)}, {"k": (3, 6)}], r"overlap in k\[3:4\]"),
        ([{"b": (0, 2)}, {"n": (0, 8)}], r"b\[0:2\] and n\[0:8\] overlap in b\[0:2\]"),
    ],
)  # fmt: skip
def test_missing_or_repeated_work_raises_coverage_error(
    ranges: list[dict[str, tuple[int, int]]], match: str
) -> None:
    with pytest.raises(ss.CoverageError, match=match):
        check_coverage(planned(*ranges))


def test_parts_without_a_device_raise_plan_error_with_their_names() -> None:
    plan = ss.Plan(two_linears(), range(2))
    for op in plan.graph.ops[1:]:
        plan.op_assign(op, 0)
    plan.op_trans(plan.graph.ops[0], ss.split("b", 2))
    with pytest.raises(ss.PlanError, match=r"2 parts have no device: up:linear b\[0:2\], up"):
        check_assigned(plan)


def test_incomplete_update_op_raises_coverage_error() -> None:
    plan = on_one(ss.Plan(two_linears(), range(2)))
    parts = plan.op_trans(plan.update("up.weight"), ss.pieces({"d0": (0, 7)}))
    plan.op_assign(parts, [1])
    with pytest.raises(ss.CoverageError, match=r"no part of up.weight:update computes d0\[7:8\]"):
        ss.compile(plan)
