"""Under torch.compile a call is one operator of one graph, and its gradient is another one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import rvdcomm as rv
import rvdcomm.interop.dtensor as rd
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import shard_of

pytestmark = [
    pytest.mark.dist,
    # torch itself warns while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SHAPE = (3, 5)
ROWS, COLUMNS = rv.Layout(SHAPE, "R(1)V(1)D(2,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,2)")
WHOLE, PARTS = rv.Layout(SHAPE, "R(2)V(1)D(1,1)"), rv.Layout(SHAPE, "R(1)V(2)D(1,1)")
SWAPPED = rv.Layout(SHAPE, "R(1)V(1)D(2,1)", [1, 0])
PAIRS = {"D->D'": (ROWS, COLUMNS), "R->D": (WHOLE, COLUMNS), "V->R": (PARTS, WHOLE)}
"""The shapes of the shards differ between ranks."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled to one graph; a graph break is an error."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def forward_and_backward(
    function: Callable[[Tensor], Tensor], shard: Tensor
) -> tuple[list[Any], list[Any]]:
    leaf = shard.detach().clone().requires_grad_()
    result = function(leaf)
    (result * result).sum().backward()
    return result.tolist(), leaf.grad.tolist()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replica_grads": "copies", "executor": "dist"},
        {"topology": rv.Topology.single_host(2, 1e-6, 1e9), "requires_grad": True},
    ],
    ids=["plain", "copies", "topology"],
)
@on_ranks(2)
def test_a_call_is_one_graph_with_its_gradient(
    rank: int, pair: str, options: dict[str, Any]
) -> None:
    """The compiled function gives the results of the uncompiled one, with any options."""
    src, dst = PAIRS[pair]

    def function(x: Tensor) -> Tensor:
        return rv.redistribute(x * 2, src, dst, **options) + 1

    shard = shard_of(rank, src)
    wanted = forward_and_backward(function, shard)
    assert forward_and_backward(compiled(function), shard) == wanted


@on_ranks(2)
def test_compiled_call_accepts_texts_with_a_shape_and_a_group(rank: int) -> None:
    group = dist.new_group([1, 0])

    def function(x: Tensor) -> Tensor:
        return rv.redistribute(x, str(ROWS.rvd), str(COLUMNS.rvd), shape=SHAPE, group=group)

    shard = shard_of(dist.get_rank(group), ROWS)
    assert torch.equal(compiled(function)(shard), function(shard))


@on_ranks(2)
def test_compiled_function_is_correct_for_changing_layouts(rank: int) -> None:
    """One compiled function with layouts as arguments; two layouts differ only in rank order."""

    def function(x: Tensor, src: rv.Layout, dst: rv.Layout) -> Tensor:
        return rv.redistribute(x, src, dst).sin()

    made = compiled(function)
    pairs = [(ROWS, COLUMNS), (ROWS, WHOLE), (ROWS, SWAPPED), (ROWS, COLUMNS), (SWAPPED, ROWS)]
    shards = [shard_of(rank, src) for src, _ in pairs]
    assert [
        torch.equal(made(shard, *pair), function(shard, *pair))
        for shard, pair in zip(shards, pairs, strict=True)
    ] == [True] * 5


@pytest.mark.parametrize("requires_grad", [None, False])
@on_ranks(2)
def test_redistributor_call_is_one_graph(rank: int, requires_grad: bool | None) -> None:
    call = rv.Redistributor(rv.plan(ROWS, WHOLE))

    def function(x: Tensor) -> Tensor:
        return call(x * 3, requires_grad=requires_grad).cos()

    leaf = shard_of(rank, ROWS).requires_grad_()
    results = [made(leaf) for made in (function, compiled(function))]
    assert torch.equal(*results)
    assert [result.requires_grad for result in results] == [requires_grad is None] * 2
    if requires_grad is None:
        assert torch.equal(*(torch.autograd.grad(each.sum(), leaf)[0] for each in results))


@on_ranks(2)
def test_compiled_redistributors_of_two_dtypes_do_not_mix(rank: int) -> None:
    """Call Redistributors of two dtypes in turn, each compiled once."""
    torch.compiler.reset()
    dtypes = torch.float32, torch.float64
    calls = [rv.Redistributor(rv.plan(ROWS, WHOLE, dtype)) for dtype in dtypes]
    functions = [
        torch.compile(lambda x, call=call: call(x) + 1, fullgraph=True, backend="aot_eager")
        for call in calls
    ]
    shard = shard_of(rank, ROWS)
    assert [
        torch.equal(function(shard.to(dtype)), call(shard.to(dtype)) + 1)
        for _ in range(2)
        for function, call, dtype in zip(functions, calls, dtypes, strict=True)
    ] == [True] * 4


@on_ranks(2)
def test_every_call_is_one_operator_of_the_graph(rank: int) -> None:
    """The operators in the graph of two calls, one after the other."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def function(x: Tensor) -> Tensor:
        return rv.redistribute(rv.redistribute(x, ROWS, COLUMNS), COLUMNS, ROWS)

    torch.compiler.reset()
    shard = shard_of(rank, ROWS)
    result = torch.compile(function, fullgraph=True, backend=backend)(shard)
    assert torch.equal(result, shard)
    assert found == ["rvdcomm.redistribute.default"] * 2


def test_import_of_the_api_does_not_import_torch_dynamo() -> None:
    # The import of torch._dynamo takes longer than all other imports.
    code = "import sys, torch, rvdcomm.api; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


# --- calls that break the graph -----------------------------------------------------------------

APART = rv.Layout((4,), "R(1)V(1)D(1)", [0]), rv.Layout((4,), "R(1)V(1)D(1)", [1])
TEXTS = "R(1)V(1)D(2)", "R(2)V(1)D(1)"


def send(x: Tensor | None) -> Any:
    moved = rv.redistribute(None if x is None else x + 1, *APART, dtype=torch.float32)
    return moved if moved is None else moved * 2


def infer(x: Tensor) -> Tensor:
    return rv.redistribute(x + 1, *TEXTS) * 2


def fill_out(x: Tensor) -> Tensor:
    out = torch.empty(4)
    rv.redistribute(x + 1, *TEXTS, shape=(4,), out=out)
    return out * 2


def start(x: Tensor) -> Any:
    return rv.redistribute(x + 1, *TEXTS, shape=(4,), async_op=True)


BREAKING = {"a rank has no result": send, "shape is inferred": infer, "out": fill_out}


@pytest.mark.parametrize("what", BREAKING)
@on_ranks(2)
def test_calls_that_cannot_be_traced_break_the_graph_once(rank: int, what: str) -> None:
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    function = BREAKING[what]
    shard = torch.arange(4.0) if function is send else torch.arange(2.0)
    args = (None if function is send and rank == 1 else shard,)
    torch.compiler.reset()
    result, wanted = torch.compile(function, backend=backend)(*args), function(*args)
    assert result is wanted if wanted is None else torch.equal(result, wanted)
    before = ["out", "add"] if what == "out" else ["add"]
    assert found == ([[before], [["mul"]]][rank] if function is send else [before, ["mul"]])


@on_ranks(2)
def test_asynchronous_call_is_correct_under_torch_compile(rank: int) -> None:
    torch.compiler.reset()
    shard = torch.arange(2.0) + rank
    assert torch.equal(torch.compile(start, backend="eager")(shard).wait(), start(shard).wait())


# --- first calls, inside a compiled function ----------------------------------------------------


def first_many(x: Tensor, group: Any) -> Tensor:
    return rv.redistribute_many({"w": x}, {"w": ROWS}, {"w": COLUMNS}, group=group)["w"] + 0


def first_in_group(x: Tensor, group: Any) -> Tensor:
    return rv.redistribute(x, ROWS, COLUMNS, group=group) + 0


def first_redistributor(x: Tensor, group: Any) -> Tensor:
    return rv.Redistributor(rv.plan(ROWS, COLUMNS), group)(x) + 0


def first_dtensor(x: Tensor, group: Any) -> Tensor:
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(x, mesh, [Shard(0)], shape=SHAPE, stride=(SHAPE[1], 1))
    return rd.redistribute(tensor, mesh, [Shard(1)], group=group).to_local() + 0


FIRST = (first_many, first_in_group, first_redistributor, first_dtensor)


@pytest.mark.parametrize("function", FIRST)
@on_ranks(2)
def test_the_first_call_of_a_group_may_be_inside_a_compiled_function(
    rank: int, function: Callable[..., Any]
) -> None:
    """The first call of a new group is inside a compiled function."""
    group, shard = dist.new_group([0, 1]), shard_of(rank, ROWS)
    with warnings.catch_warnings():
        # Dynamo warns of functions that it does not trace.
        warnings.simplefilter("ignore")
        result = torch.compile(function, backend="eager")(shard, group)
    assert torch.equal(result, rv.redistribute(shard, ROWS, COLUMNS))
