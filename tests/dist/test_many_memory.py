"""What tensors and outs of one call of redistribute_many may have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.api.many_memory import Tied
from rvdcomm.interop import dtensor
from tests.covering import covering, each_value
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of

pytestmark = pytest.mark.dist

EXECUTORS = ("dist", pytest.param("peer", marks=pytest.mark.native))
Outs = Callable[[], Mapping[str, Tensor]]


def block() -> Tensor:
    return torch.full((8, 12), -1.0)


OVERLAPPING: dict[str, Outs] = {
    "begin in each other": lambda: {"q": (p := block())[:4, :6], "k": p[3:7, :6]},
    "one memory": lambda: {"q": (p := block())[:4, :6], "k": p[:4, :6]},
    "inside": lambda: {"q": (p := block())[::2, :6], "k": p[2:6, :6]},
    "a row and its column": lambda: {"q": (p := block())[:4, :6], "k": p.t()[:4, :6]},
    "of two storages": lambda: {
        "q": (p := block())[:4, :6],
        "k": torch.from_numpy(p.numpy())[3:7, :6],
    },
    "a bit of the last row": lambda: {
        "q": (p := block().view(-1))[:24].view(4, 6),
        "k": p[23:47].view(4, 6),
    },
}
"""Outs of two tensors that are no results of one call; 4 x 6 each."""

APART: dict[str, Outs] = {
    "alternating columns": lambda: {"q": (p := block())[:4, ::2], "k": p[:4, 1::2]},
    "columns": lambda: {"q": (p := block())[:4, :6], "k": p[:4, 6:]},
    "alternating rows": lambda: {"q": (p := block())[::2, :6], "k": p[1::2, :6]},
    "transposed": lambda: {"q": (p := torch.zeros(6, 8)).t()[:4], "k": p.t()[4:]},
}
"""Outs that lie in each other's gaps."""


def sides(names: str = "qk") -> tuple[dict[str, rv.Layout], dict[str, rv.Layout]]:
    """A gather of two parts of [4, 6], and the sum of them: parts are added in the result."""
    src, dst = rv.Layout((4, 6), "R(1)V(2)D(1,1)"), rv.Layout((4, 6), "R(2)V(1)D(1,1)")
    return dict.fromkeys(names, src), dict.fromkeys(names, dst)


def parts(rank: int, name: str = "q") -> Tensor:
    return (1 + rank) * torch.arange(24.0).view(4, 6) + ord(name)


def whole(name: str) -> Tensor:
    return parts(0, name) + parts(1, name)


def by_engine(given: Any, src: Any, dst: Any, **options: Any) -> Any:
    return rv.redistribute_many(given, src, dst, **options)


def by_interop(given: Any, src: Any, dst: Any, **options: Any) -> Any:
    return dtensor.redistribute_many(given, dst, src=src, **options)


@covering(what=OVERLAPPING, call=[by_engine, by_interop], is_later=[False, True])
@on_ranks(2)
def test_overlapping_outs_are_an_error_that_names_both(
    rank: int, what: str, call: Callable[..., Any], is_later: bool
) -> None:
    """In a first or in a later call; the next call is right."""
    names = f"{what}{is_later}{call.__name__}"
    src, dst = ({f"{names} {n}": side[n] for n in "qk"} for side in sides())
    given = {f"{names} {n}": parts(rank, n) for n in "qk"}

    def run(outs: Mapping[str, Tensor]) -> Any:
        return call(given, src, dst, out={f"{names} {n}": out for n, out in outs.items()})

    if is_later:
        run({})
    error = error_of(lambda: run(OVERLAPPING[what]()))
    want = r"LayoutError: .*tensor '.* q': rank \d: out shares memory with the out of '.* k'"
    assert re.match(want, error), error
    found = run(APART["columns"]())
    assert all(torch.equal(found[f"{names} {n}"], whole(n)) for n in "qk")


@each_value(what=APART, executor=["dist", "peer"])
@on_ranks(2)
def test_outs_may_lie_in_each_others_gaps(rank: int, what: str, executor: str) -> None:
    outs, given = APART[what](), {n: parts(rank, n) for n in "qk"}
    found = rv.redistribute_many(given, *sides(), out=outs, executor=executor)
    assert all(found[n] is outs[n] and torch.equal(outs[n], whole(n)) for n in "qk")


# --- tied names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("is_later", [False, True], ids=["first", "later"])
@on_ranks(2)
def test_tied_names_may_have_one_out(rank: int, executor: str, is_later: bool) -> None:
    """An embedding and an output layer of one memory, with another tensor beside them."""
    sides_of = sides("qkw")
    given = {"q": (q := parts(rank)), "k": q, "w": parts(rank, "w")}
    out = block()[:4, :6].contiguous()
    outs = {"q": out, "k": out, "w": block()[:4, ::2]}
    options = {"executor": executor, "memory_limit": 1 << (20 + is_later)}
    if is_later:
        rv.redistribute_many({n: parts(rank, n) for n in "qkw"}, *sides_of, **options)
    for _ in range(3):
        out.fill_(-1)
        found = rv.redistribute_many(given, *sides_of, out=outs, **options)
        assert all(found[n] is outs[n] for n in "qkw")
        assert torch.equal(out, whole("q"))
        assert torch.equal(outs["w"], whole("w"))


@pytest.mark.parametrize("are_tied", [False, True])
@on_ranks(2)
def test_names_are_tied_if_they_are_on_every_rank_that_holds_their_tensors(
    rank: int, are_tied: bool
) -> None:
    """Rank 0 trains, rank 1 serves with tied weights."""
    src, dst = (dict.fromkeys("qk", rv.Layout((4, 6), "R(1)V(1)D(1,1)", (i,))) for i in (0, 1))
    want = r"LayoutError: .*tensor 'q': rank 1: out shares memory with the out of 'k', and .* tied"
    for _ in range(2):
        q, out = parts(0), block()[:4, :6]
        given = {"q": q, "k": q if are_tied else q.clone()} if rank == 0 else {}
        outs = {"q": out, "k": out} if rank == 1 else {}
        error = error_of(lambda g=given, o=outs: rv.redistribute_many(g, src, dst, out=o))
        assert error == "none" if are_tied else re.match(want, error), error
        assert rank == 0 or not are_tied or (out == q).all()


@on_ranks(2)
def test_tensors_that_are_tied_elsewhere_may_not_be_parted_later(rank: int) -> None:
    """The trainer's tensors are tied in the first call alone, the engine's outs in both."""
    src, dst = (dict.fromkeys("ab", rv.Layout((4, 6), "R(1)V(1)D(1,1)", (i,))) for i in (0, 1))
    tensor, out = parts(0), block()[:4, :6]
    outs = {"a": out, "b": out} if rank == 1 else {}
    rv.redistribute_many({"a": tensor, "b": tensor} if rank == 0 else {}, src, dst, out=outs)
    if rank == 0:
        error = error_of(lambda: rv.redistribute_many({"a": tensor, "b": parts(1)}, src, dst))
        assert re.match(r"LayoutError: .*'a': rank 0: .* the out of 'b' on other ranks, as", error)


@on_ranks(2)
def test_tied_names_may_be_gathered_in_place(rank: int) -> None:
    src, dst = rv.Layout((8,), "R(1)V(1)D(2)"), rv.Layout((8,), "R(2)V(1)D(1)")
    out = torch.full((8,), -1.0)
    mine = out[4 * rank : 4 * rank + 4].copy_(torch.arange(4.0) + 4 * rank)
    pair = dict.fromkeys(("x", "y"), src), dict.fromkeys(("x", "y"), dst)
    rv.redistribute_many({"x": mine, "y": mine}, *pair, out={"x": out, "y": out})
    assert torch.equal(out, torch.arange(8.0))


# --- tensors and scales -------------------------------------------------------------------------


@on_ranks(2)
def test_a_source_may_lie_in_the_gaps_of_an_out_and_not_in_its_elements(rank: int) -> None:
    src, dst = rv.Layout((4, 6), "R(1)V(2)D(1,1)"), rv.Layout((4, 6), "R(2)V(1)D(1,1)")
    p = torch.zeros(4, 13)
    tensor, out = p[:, 1:12:2].copy_(parts(rank)), p[:, 0:12:2]

    def many(tensor: Tensor) -> Any:
        return rv.redistribute_many({"s": tensor}, {"s": src}, {"s": dst}, out={"s": out})["s"]

    assert torch.equal(many(tensor), whole("q"))
    assert torch.equal(rv.redistribute(tensor, src, dst, out=out.fill_(-1)), whole("q"))
    error = error_of(lambda: many(p[:, 2::2]))
    assert re.search("tensor 's': rank .*out shares memory with the tensor", error)


@on_ranks(2)
def test_a_scale_may_not_lie_in_an_out(rank: int) -> None:
    layout = {"f": rv.Layout((4, 6), "R(2)V(1)D(1,1)")}
    given, out = {"f": torch.ones(4, 6).to(torch.float8_e4m3fn)}, torch.zeros(4, 6)
    options = {"dst_dtype": torch.float32, "scale": {"f": out[:1]}, "out": {"f": out}}
    error = error_of(lambda: rv.redistribute_many(given, layout, layout, **options))
    assert re.match(r"LayoutError: .*'f': rank 0: its scale shares memory with an out", error)


def test_tied_names_are_those_of_one_memory_on_all_ranks_that_hold_them() -> None:
    names = {name: name for name in "abcd"}
    src = dict.fromkeys("abcd", rv.Layout((4,), "R(2)V(1)D(1)"))
    told = {0: (["abc"], ["ab"]), 1: (["ab", "cd"], [])}
    found = Tied.of(told, names, src, src)
    assert found.has("a", "b")
    assert not found.has("a", "c")
    assert not found.has("c", "d")
    with pytest.raises(rv.LayoutError, match="'a': rank 1: out shares memory with the out of 'c'"):
        Tied.of({**told, 1: (["ab"], ["ac"])}, names, src, src)


@on_ranks(2)
def test_a_call_of_dtensors_in_the_background_is_an_error_on_all_ranks(rank: int) -> None:
    src, dst = sides("q")
    error = error_of(lambda: by_interop({"q": parts(rank)}, src, dst, async_op=rank == 1))
    assert re.match(r"LayoutError: .*rank 1: async_op=True is for rvdcomm.redistr", error)
