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
from tests.dist.shards import shard_of
from tests.dist.world import Worlds

pytestmark = [
    pytest.mark.dist,
    # torch itself warns while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SHAPE = (3, 5)
ROWS, COLUMNS = rv.Layout(SHAPE, "R(1)V(1)D(2,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,2)")
WHOLE, PARTS = rv.Layout(SHAPE, "R(2)V(1)D(1,1)"), rv.Layout(SHAPE, "R(1)V(2)D(1,1)")
SWAPPED = rv.Layout(SHAPE, "R(1)V(1)D(2,1)", [1, 0])
PAIRS = {
    "D->D'": (ROWS, COLUMNS),
    "D->R": (ROWS, WHOLE),
    "R->D": (WHOLE, COLUMNS),
    "V->R": (PARTS, WHOLE),
    "V->D": (PARTS, COLUMNS),
    "R->R": (WHOLE, WHOLE),
}
"""The shapes of the shards differ between ranks."""


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """The function compiled to one graph; a graph break is an error."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def forward_and_backward(
    function: Callable[[Tensor], Tensor], shard: Tensor
) -> tuple[list[Any], list[Any]]:
    leaf = shard.detach().clone().requires_grad_()
    result = function(leaf)
    (result * result).sum().backward()
    return result.tolist(), leaf.grad.tolist()


def compare(
    rank: int, src: rv.Layout, dst: rv.Layout, backend: str, options: dict[str, Any]
) -> bool:
    """Whether the compiled function gives the results of the uncompiled one."""

    def function(x: Tensor) -> Tensor:
        return rv.redistribute(x * 2, src, dst, **options) + 1

    shard = shard_of(rank, src)
    wanted = forward_and_backward(function, shard)
    return forward_and_backward(compiled(function, backend), shard) == wanted


@pytest.mark.parametrize("pair", PAIRS)
def test_a_call_is_one_graph_with_its_gradient(worlds: Worlds, pair: str) -> None:
    assert worlds(2).run(compare, *PAIRS[pair], "aot_eager", {}) == [True] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"replica_grads": "copies"},
        {"executor": "dist"},
        {"topology": rv.Topology.single_host(2, 1e-6, 1e9)},
        {"requires_grad": True},
    ],
    ids=str,
)
def test_options_have_the_same_effect_in_a_compiled_call(
    worlds: Worlds, options: dict[str, Any]
) -> None:
    assert worlds(2).run(compare, ROWS, WHOLE, "aot_eager", options) == [True] * 2


def call_with_texts(rank: int) -> bool:
    def function(x: Tensor) -> Tensor:
        return rv.redistribute(x, str(ROWS.rvd), str(COLUMNS.rvd), shape=SHAPE)

    shard = shard_of(rank, ROWS)
    return torch.equal(compiled(function)(shard), function(shard))


def test_compiled_call_accepts_texts_with_a_shape(worlds: Worlds) -> None:
    assert worlds(2).run(call_with_texts) == [True] * 2


def call_in_group(rank: int) -> bool:
    group = dist.new_group([1, 0])

    def function(x: Tensor) -> Tensor:
        return rv.redistribute(x, ROWS, COLUMNS, group=group)

    shard = shard_of(dist.get_rank(group), ROWS)
    return torch.equal(compiled(function)(shard), function(shard))


def test_compiled_call_accepts_a_group(worlds: Worlds) -> None:
    assert worlds(2).run(call_in_group) == [True] * 2


def call_with_many_layouts(rank: int) -> list[bool]:
    """One compiled function with layouts as arguments; two layouts differ only in rank order."""

    def function(x: Tensor, src: rv.Layout, dst: rv.Layout) -> Tensor:
        return rv.redistribute(x, src, dst).sin()

    made = compiled(function)
    pairs = [(ROWS, COLUMNS), (ROWS, WHOLE), (ROWS, SWAPPED), (ROWS, COLUMNS), (SWAPPED, ROWS)]
    shards = [shard_of(rank, src) for src, _ in pairs]
    return [
        torch.equal(made(shard, *pair), function(shard, *pair))
        for shard, pair in zip(shards, pairs, strict=True)
    ]


def test_compiled_function_is_correct_for_changing_layouts(worlds: Worlds) -> None:
    assert worlds(2).run(call_with_many_layouts) == [[True] * 5] * 2


def call_redistributor(rank: int, requires_grad: bool | None) -> bool:
    call = rv.Redistributor(rv.plan(ROWS, WHOLE))

    def function(x: Tensor) -> Tensor:
        return call(x * 3, requires_grad=requires_grad).cos()

    leaf = shard_of(rank, ROWS).requires_grad_()
    results = [made(leaf) for made in (function, compiled(function))]
    if requires_grad is False:
        return torch.equal(*results) and not results[1].requires_grad
    grads = [torch.autograd.grad(result.sum(), leaf)[0] for result in results]
    return torch.equal(*results) and torch.equal(*grads)


@pytest.mark.parametrize("requires_grad", [None, False])
def test_redistributor_call_is_one_graph(worlds: Worlds, requires_grad: bool | None) -> None:
    assert worlds(2).run(call_redistributor, requires_grad) == [True] * 2


def call_two_dtypes(rank: int) -> list[bool]:
    """Call Redistributors of two dtypes in turn, each compiled once."""
    torch.compiler.reset()
    dtypes = torch.float32, torch.float64
    calls = [rv.Redistributor(rv.plan(ROWS, WHOLE, dtype)) for dtype in dtypes]
    functions = [
        torch.compile(lambda x, call=call: call(x) + 1, fullgraph=True, backend="aot_eager")
        for call in calls
    ]
    shard = shard_of(rank, ROWS)
    return [
        torch.equal(function(shard.to(dtype)), call(shard.to(dtype)) + 1)
        for _ in range(2)
        for function, call, dtype in zip(functions, calls, dtypes, strict=True)
    ]


def test_compiled_redistributors_of_two_dtypes_do_not_mix(worlds: Worlds) -> None:
    assert worlds(2).run(call_two_dtypes) == [[True] * 4] * 2


def operators_of(rank: int) -> list[str]:
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
    return found


def test_every_call_is_one_operator_of_the_graph(worlds: Worlds) -> None:
    assert worlds(2).run(operators_of) == [["rvdcomm.redistribute.default"] * 2] * 2


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


def graphs_of(rank: int, what: str) -> tuple[list[list[str]], bool]:
    """The operators of all graphs that one call makes, and whether its result is right."""
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    function = BREAKING[what]
    shard = torch.arange(4.0) if function is send else torch.arange(2.0)
    args = (None if function is send and rank == 1 else shard,)
    torch.compiler.reset()
    result, wanted = torch.compile(function, backend=backend)(*args), function(*args)
    return found, result is wanted if wanted is None else torch.equal(result, wanted)


@pytest.mark.parametrize("what", BREAKING)
def test_calls_that_cannot_be_traced_break_the_graph_once(worlds: Worlds, what: str) -> None:
    graphs, are_right = zip(*worlds(2).run(graphs_of, what), strict=True)
    assert are_right == (True,) * 2
    before, after = ["add"], ["mul"]
    if what == "out":
        before = ["out", "add"]
    assert list(graphs) == (
        [[before], [after]] if what == "a rank has no result" else [[before, after]] * 2
    )


def compile_async(rank: int) -> bool:
    torch.compiler.reset()
    shard = torch.arange(2.0) + rank
    return torch.equal(torch.compile(start, backend="eager")(shard).wait(), start(shard).wait())


def test_asynchronous_call_is_correct_under_torch_compile(worlds: Worlds) -> None:
    assert worlds(2).run(compile_async) == [True] * 2


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


def compile_first(rank: int, function: Callable[..., Any]) -> bool:
    """The first call of a new group is inside a compiled function."""
    group, shard = dist.new_group([0, 1]), shard_of(rank, ROWS)
    with warnings.catch_warnings():
        # Dynamo warns of functions that it does not trace.
        warnings.simplefilter("ignore")
        result = torch.compile(function, backend="eager")(shard, group)
    return torch.equal(result, rv.redistribute(shard, ROWS, COLUMNS))


@pytest.mark.parametrize("function", FIRST)
def test_the_first_call_of_a_group_may_be_inside_a_compiled_function(
    worlds: Worlds, function: Callable[..., Any]
) -> None:
    assert worlds(2).run(compile_first, function) == [True, True]
