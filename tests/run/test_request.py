"""Laws of requests: equal posts give every rank one plan, or one error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm.run.request import (
    COMMON,
    TransitionRequest,
    check_in_group,
    check_tensors,
    needs_grad,
    resolve,
    shard_shape,
)
from tests.covering import each_value
from tests.oracle import all_rvds

SRC, DST = rv.Layout((8,), "R(1)V(1)D(4)"), rv.Layout((8,), "R(4)V(1)D(1)")
TOPOLOGY = rv.Topology.single_host(4, 1e-6, 1e9)
WHAT = f"redistribute {SRC} -> {DST}"
SHORT = f"redistribute {SRC.rvd} -> {DST.rvd}"
GOOD = TransitionRequest(str(SRC), str(DST), None, None, (2,), None, ("float32",))


def of_ranks(num_ranks: int = 4, **by_rank: dict[str, Any]) -> dict[int, TransitionRequest]:
    """Good requests of all ranks, some of them changed: ``rank2={"shard": (3,)}``."""
    return {
        rank: replace(GOOD, **by_rank.get(f"rank{rank}", {}), **by_rank.get("every", {}))
        for rank in range(num_ranks)
    }


def resolved(
    requests: Mapping[int, TransitionRequest],
    src: rv.Layout | str = SRC,
    dst: rv.Layout | str = DST,
    topology: rv.Topology | None = None,
    group_size: int = 4,
) -> rv.Plan:
    return resolve(requests, src, dst, topology, group_size)


def of_texts(
    src: str, dst: str, shape: tuple[int, ...] | None, shards: list[tuple[int, ...] | None]
) -> dict[int, TransitionRequest]:
    """Requests of ranks that were given texts, and passed these shards."""
    return {
        rank: TransitionRequest(
            src, dst, shape, None, shard, None, () if shard is None else ("float32",)
        )
        for rank, shard in enumerate(shards)
    }


def error_of(requests: Mapping[int, TransitionRequest], *args: Any, **kwargs: Any) -> str:
    with pytest.raises((rv.LayoutError, rv.ShapeMismatchError)) as caught:
        resolved(requests, *args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


# --- journeys -----------------------------------------------------------------------------------

REQUESTS = [
    GOOD,
    replace(GOOD, shape=(8,), topology=repr(TOPOLOGY)),
    replace(GOOD, shape=(), shard=(), out=(), dtypes=()),
    replace(GOOD, shard=None, out=(8,), dtypes=("bool", "float8_e5m2")),
    replace(GOOD, src='R(1)V(1)D(4) "\n\\ü', misuse="out shares memory"),
    replace(GOOD, requires_grad=True, asks_grad=True, replica_grads="copies"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_requests_round_trip_as_json(request_: TransitionRequest) -> None:
    assert TransitionRequest.from_json(json.loads(json.dumps(request_.to_json()))) == request_


# --- one plan -----------------------------------------------------------------------------------


def test_resolved_plan_has_the_layouts_the_dtype_and_the_topology() -> None:
    requests = of_ranks(every={"dtypes": ("bfloat16",), "topology": repr(TOPOLOGY)})
    assert resolved(requests, topology=TOPOLOGY) is rv.plan(SRC, DST, "bfloat16", TOPOLOGY)
    assert str(GOOD) == WHAT


@pytest.mark.parametrize("src", [SRC, str(SRC)], ids=["layout", "text"])
@pytest.mark.parametrize("dst", [DST, str(DST)], ids=["layout", "text"])
def test_texts_and_layouts_resolve_to_the_same_plan(
    src: rv.Layout | str, dst: rv.Layout | str
) -> None:
    assert resolved(of_ranks(), src, dst) is rv.plan(SRC, DST)


def test_ranks_outside_src_may_pass_no_shard() -> None:
    src, dst = rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(1)V(1)D(2)", [2, 3])
    common = {"src": str(src), "dst": str(dst)}
    requests = {
        rank: replace(
            GOOD, shard=(4,) if rank < 2 else None, dtypes=("int8",) * (rank < 2), **common
        )
        for rank in range(4)
    }
    assert resolved(requests, src, dst).dtype == "int8"


def test_out_may_be_given_by_some_ranks() -> None:
    requests = of_ranks(rank1={"out": (8,), "dtypes": ("float32", "float32")})
    assert resolved(requests) is rv.plan(SRC, DST)


# --- texts and shapes ---------------------------------------------------------------------------


@each_value(
    src=[str(rvd) for rvd in all_rvds(8, 2)],
    shape=[(8, 12), (6, 10), (3, 5), (2, 7), (1, 1), (0, 4)],
)
def test_shape_is_inferred_from_the_shards_of_every_layout(
    src: str, shape: tuple[int, ...]
) -> None:
    layout = rv.Layout(shape, src)
    dst = "R(8)V(1)D(1,1)"
    requests = of_texts(src, dst, None, [shard_shape(layout, rank) for rank in range(8)])
    assert resolved(requests, src, dst, group_size=8).src == layout


@pytest.mark.parametrize("src", [str(rvd) for rvd in all_rvds(4, 1)])
def test_given_shape_is_used_for_src_and_dst(src: str) -> None:
    layout, dst = rv.Layout((7,), src), "R(1)V(4)D(1)"
    requests = of_texts(src, dst, (7,), [shard_shape(layout, rank) for rank in range(4)])
    plan = resolved(requests, src, dst)
    assert (plan.src, plan.dst) == (layout, rv.Layout((7,), dst))


def test_text_as_dst_takes_the_shape_of_a_layout_as_src() -> None:
    requests = of_ranks(every={"dst": "R(2)V(2)D(1)"})
    plan = resolved(requests, SRC, "R(2)V(2)D(1)")
    assert plan.dst == rv.Layout((8,), "R(2)V(2)D(1)")


def test_whole_texts_define_ranks_and_cuts() -> None:
    text = "R(1)V(1)D(2) shape(8) ranks(3,1) cuts(0,1,8)"
    shards: list[tuple[int, ...] | None] = [None, (7,), None, (1,)]
    plan = resolved(of_texts(text, str(DST), None, shards), text, DST)
    assert plan.src == rv.Layout((8,), "R(1)V(1)D(2)", [3, 1], [[0, 1, 8]])


@pytest.mark.parametrize(
    "shards, listed",
    [
        ([(2,), None, (2,), (2,)], "['[2]', 'None', '[2]', '[2]']"),
        ([(2,), (2,), (2, 1), (2,)], "['[2]', '[2]', '[2, 1]', '[2]']"),
    ],
    ids=["no shard", "wrong number of dims"],
)
def test_shape_that_cannot_be_inferred_is_an_error(
    shards: list[tuple[int, ...] | None], listed: str
) -> None:
    src, dst = "R(1)V(1)D(4)", "R(4)V(1)D(1)"
    assert error_of(of_texts(src, dst, None, shards), src, dst) == (
        f"ShapeMismatchError: redistribute {src} -> {dst}: {src}: the global shape cannot be "
        f"inferred from shards of shapes {listed}; pass shape=."
    )


# --- one error: ranks that disagree -------------------------------------------------------------

OTHER = {
    "src": ("R(2)V(1)D(2)", str(SRC)),
    "dst": ("R(2)V(1)D(2)", str(DST)),
    "shape": ((9,), "None"),
    "topology": (repr(TOPOLOGY), "None"),
    "executor": ("dist", "auto"),
    "memory_limit": (4096, "None"),
    "replica_grads": ("copies", "parts"),
}


def test_disagreement_cases_cover_every_common_field() -> None:
    assert set(OTHER) == set(COMMON)


@each_value(name=COMMON, rank=[1, 3])
def test_error_names_both_ranks_that_disagree(name: str, rank: int) -> None:
    value, asked = OTHER[name]
    assert error_of(of_ranks(**{f"rank{rank}": {name: value}})) == (
        f"LayoutError: redistribute: ranks disagree about {name}: rank 0 asks for {asked}, "
        f"rank {rank} for {value}."
    )


@pytest.mark.parametrize("name", COMMON)
def test_disagreement_error_is_the_same_on_both_ranks(name: str) -> None:
    value, _ = OTHER[name]
    requests = of_ranks(rank2={name: value})
    given = {"src": SRC, "dst": DST, "topology": None}
    theirs = {**given, **({name: value} if name in ("src", "dst") else {})}
    if name == "topology":
        theirs["topology"] = TOPOLOGY
    assert error_of(requests, **given) == error_of(requests, **theirs)


@pytest.mark.parametrize(
    "change",
    [
        {"dtypes": ("int8",)},
        {"out": (8,), "dtypes": ("float32", "int8")},
        {"dtypes": ("int8",) * 2},
    ],
    ids=["shard", "out", "dtype="],
)
def test_error_names_the_dtypes_of_ranks_that_disagree(change: dict[str, Any]) -> None:
    error = error_of(of_ranks(2, rank1=change), group_size=4)
    start = f"ShapeMismatchError: {WHAT}: ranks disagree about dtype: "
    assert error.startswith(start)
    assert sorted(error.removeprefix(start).rstrip(".").split(", ")) in (
        ["rank 0 has float32", "rank 1 has int8"],
        ["rank 1 has float32", "rank 1 has int8"],
    )


# --- one error: what no rank should ask for -----------------------------------------------------


def asking(src: rv.Layout | str, dst: rv.Layout | str = DST, **change: Any) -> tuple[Any, ...]:
    """Requests of four ranks for this transition, and what each rank was given."""
    return of_ranks(every={"src": str(src), "dst": str(dst), **change}), src, dst


def of_counts(src: str, needs: str, shape: tuple[int, ...] | None) -> tuple[Any, ...]:
    dst = "R(4)V(1)D(1)"
    error = f"{src} needs {needs} but 4 were given: (0, 1, 2, 3)."
    return (of_texts(src, dst, shape, [(2,)] * 4), src, dst), "LayoutError", error


NINE = rv.Layout((9,), "R(4)V(1)D(1)")
SMALL = rv.Topology.single_host(3, 0.0, 1e9)
ERRORS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "counts": of_counts("R(1)V(1)D(3)", "3 ranks (1*1*3)", (8,)),
    "counts, inferred": of_counts("R(1)V(2)D(4)", "8 ranks (1*2*4)", None),
    "more splits than ranks": of_counts("R(1)V(1)D(8)", "8 ranks (1*1*8)", None),
    "unknown dtype": (
        asking(SRC, dtypes=("qint8",)),
        "LayoutError",
        "dtype 'qint8' is unknown; the known ones are ",
    ),
    "no shard": (
        asking(SRC, shard=None, dtypes=()),
        "ShapeMismatchError",
        "no rank passed a shard, so the dtype is unknown.",
    ),
    "dtype without a sum": (
        asking(rv.Layout((8,), "R(1)V(4)D(1)"), shard=(8,), dtypes=("bool",)),
        "LayoutError",
        "R(1)V(4)D(1) has V(4), but bool values cannot be summed; use V(1) or another dtype.",
    ),
    "different shapes": (
        asking(SRC, NINE),
        "LayoutError",
        f"src {SRC} and dst {NINE} differ in shape: (8,) and (9,).",
    ),
    "rank outside the group": (
        asking(rv.Layout((8,), "R(1)V(1)D(4)", [0, 1, 2, 6])),
        "LayoutError",
        "ranks [6] are outside the group, which has ranks 0 to 3.",
    ),
    "rank outside the topology": (
        (*asking(SRC, topology=repr(SMALL)), SMALL),
        "LayoutError",
        "ranks [3] are not in the topology, which has [0, 1, 2].",
    ),
    "unparsable": (
        asking("R1V1D(4)"),
        "LayoutError",
        "cannot parse layout 'R1V1D(4)': expected 'R(' at column 1.",
    ),
    "zero": (
        asking("R(0)V(1)D(4)"),
        "LayoutError",
        "RVD counts must be integers of at least 1, got r=0, v=1, d=(4,).",
    ),
    "rank twice": (
        asking("R(1)V(1)D(4) shape(8) ranks(0,0,1,2)"),
        "LayoutError",
        "R(1)V(1)D(4) over ranks (0, 0, 1, 2): rank 0 is given twice.",
    ),
    "cuts out of order": (
        asking("R(1)V(1)D(4) shape(8) cuts(0,4,2,6,8)"),
        "LayoutError",
        "cut points [0, 4, 2, 6, 8] of dim 0 do not cut 8 elements in 4; give 5 points in "
        "ascending order from 0 to 8.",
    ),
    "misuse": (
        (of_ranks(rank2={"misuse": "out shares memory with the tensor."}),),
        "LayoutError",
        "rank 2: out shares memory with the tensor.",
    ),
}
"""Requests and what the ranks were given; the class of the error, and what it says of them."""


@pytest.mark.parametrize("what", ERRORS)
def test_request_that_no_rank_should_make_is_an_error(what: str) -> None:
    (requests, *given), name, fact = ERRORS[what]
    src, dst = (*given, SRC, DST)[:2] if given else (SRC, DST)
    assert error_of(requests, *given).startswith(f"{name}: redistribute {src} -> {dst}: {fact}")


def test_shape_that_differs_from_the_layouts_raises_layout_error() -> None:
    error = error_of(of_ranks(every={"shape": (9,)}))
    assert error.startswith("LayoutError: ")
    assert "(9,)" in error


# --- one error: tensors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, fact",
    [
        ({"rank0": {"shard": (3,)}}, "rank 0 passed [3], its shard is [2]."),
        ({"rank2": {"shard": (2, 1)}}, "rank 2 passed [2, 1], its shard is [2]."),
        ({"rank0": {"shard": ()}}, "rank 0 passed [], its shard is [2]."),
        ({"rank2": {"shard": None, "dtypes": ()}}, "rank 2 passed None, its shard is [2]."),
        ({"rank0": {"out": (2,)}}, "rank 0 passed [2], its out is [8]."),
        ({"rank3": {"shard": (5,)}, "rank1": {"shard": (3,)}}, "rank 1 passed [3], its shard is"),
    ],
    ids=["shape", "dims", "0-d", "none", "out", "the first rank"],
)
def test_tensor_of_the_wrong_shape_raises_shape_mismatch_error(
    changes: dict[str, Any], fact: str
) -> None:
    assert error_of(of_ranks(**changes)).startswith(f"ShapeMismatchError: {SHORT}: {fact}")


@pytest.mark.parametrize(
    "changes, fact",
    [
        # A shard on rank 2, which is not in src; an out on rank 0, which is not in dst.
        ({"rank2": {"shard": (2,)}}, "rank 2 passed [2], its shard is None."),
        ({"rank0": {"out": (2,)}}, "rank 0 passed [2], its out is None."),
    ],
    ids=["shard", "out"],
)
def test_tensor_on_a_rank_outside_its_layout_raises_shape_mismatch_error(
    changes: dict[str, Any], fact: str
) -> None:
    src, dst = rv.Layout((4,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((4,), "R(1)V(1)D(2)", [1, 2])
    common = {"src": str(src), "dst": str(dst)}
    requests = of_ranks(3, every=common, **{"rank2": {"shard": None, "dtypes": ()}, **changes})
    what = f"redistribute {src.rvd} -> {dst.rvd}"
    assert error_of(requests, src, dst) == f"ShapeMismatchError: {what}: {fact}"


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank, shape", [(1, (2,)), (4, None)])
def test_shard_shape_is_none_outside_the_layout(rank: int, shape: tuple[int, ...] | None) -> None:
    assert shard_shape(SRC, rank) == shape


def test_error_names_every_rank_outside_the_group_once() -> None:
    with pytest.raises(rv.LayoutError, match=r"^here: ranks \[4, 9\] are outside the group, which"):
        check_in_group((9, 0, 4, 9, 3), 4, "here")


def test_dtype_that_differs_from_the_plan_raises_shape_mismatch_error() -> None:
    words = r"rank 1 passed int8, the plan is float32\.$"
    with pytest.raises(rv.ShapeMismatchError, match=words):
        check_tensors(rv.plan(SRC, DST), 1, replace(GOOD, dtypes=("int8",)))


# --- gradients ----------------------------------------------------------------------------------

APART = rv.plan(rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(1)V(1)D(2)", [2, 3]))


def of_grads(*requires_grad: bool | None, **changes: Any) -> dict[int, TransitionRequest]:
    """Good requests of ranks that require grad, that do not, or that do not know."""
    return {
        rank: replace(GOOD, requires_grad=wanted, **changes)
        for rank, wanted in enumerate(requires_grad)
    }


@pytest.mark.parametrize("wanted", [True, False])
def test_ranks_without_requires_grad_follow_the_others(wanted: bool) -> None:
    requests = of_grads(None, wanted, None, wanted, asks_grad=True)
    assert needs_grad(requests, rv.plan(SRC, DST)) is wanted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e5m2", "complex64"])
def test_a_gradient_flows_in_every_dtype_that_can_require_grad(dtype: str) -> None:
    assert needs_grad(of_grads(*[True] * 4), rv.plan(SRC, DST, dtype))


def grad_error_of(requests: Mapping[int, TransitionRequest], plan: rv.Plan) -> str:
    with pytest.raises(rv.LayoutError) as caught:
        needs_grad(requests, plan)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8"])
def test_gradient_of_integers_raises_layout_error(dtype: str) -> None:
    error = f"{SHORT}: {dtype} has no gradient; leave out requires_grad=True."
    assert grad_error_of(of_grads(*[True] * 4), rv.plan(SRC, DST, dtype)) == error


def test_error_names_both_ranks_that_disagree_about_requires_grad() -> None:
    error = "redistribute: ranks disagree about requires_grad: rank 1 asks for True, rank 3 for "
    requests = of_grads(None, True, None, False)
    assert grad_error_of(requests, rv.plan(SRC, DST)) == f"{error}False."


def test_gradient_through_out_raises_layout_error() -> None:
    requests = of_grads(*[True] * 4) | {2: replace(GOOD, requires_grad=True, out=(8,))}
    assert grad_error_of(requests, rv.plan(SRC, DST)).startswith(f"{SHORT}: rank 2 passed out, ")


def test_rank_without_a_result_must_pass_requires_grad() -> None:
    words = "a gradient flows back, but rank 0 is outside dst and has no result to start from"
    assert words in grad_error_of(of_grads(True, True, None, None), APART)
    assert needs_grad(of_grads(True, True, None, None, asks_grad=True), APART)
