"""Laws of propagation: a fixpoint that keeps the given specs, for every order of ops."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import pytest

import superscaler_core as ss
from superscaler_core.published.gspmd import Propagated
from tests.superscaler_core.published.gspmd.programs import completed, random_graph

MESH = "x:2,y:2"
SEEDS = range(6)


def specs_of(found: Propagated) -> dict[str, str]:
    return {name: str(found.spec(name)) for name in found.specs}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_ops_does_not_matter(seed: int) -> None:
    graph, said = random_graph(seed)
    ops = list(graph.ops)
    random.Random(seed).shuffle(ops)
    one, two = (completed(each, MESH, said) for each in (graph, replace(graph, ops=tuple(ops))))
    assert specs_of(one) == specs_of(two)
    assert one.cuts == two.cuts
    assert set(one.choices) == set(two.choices)


@pytest.mark.parametrize("seed", SEEDS)
def test_given_specs_are_kept(seed: int) -> None:
    graph, said = random_graph(seed)
    found = completed(graph, MESH, said)
    for name, text in said.items():
        spec = found.specs[name]
        assert {d: spec[d] for d in ss.ShardSpec.parse(text).said(2)} == dict(
            ss.ShardSpec.parse(text).said(2)
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_result_is_a_fixpoint(seed: int) -> None:
    """Propagation adds nothing if all its specs are given, except for the dims that are whole."""
    graph, said = random_graph(seed)
    found = completed(graph, MESH, said)
    every = {
        name: text.removesuffix("*@-") if name not in said else text
        for name, text in specs_of(found).items()
    } | {name: text for name, text in said.items() if "-" in text}
    assert specs_of(completed(graph, MESH, every)) == specs_of(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_axis_cuts_one_dim_of_a_tensor_and_one_loop_of_an_op(seed: int) -> None:
    graph, said = random_graph(seed)
    found = completed(graph, MESH, said)
    rows = [*found.specs.values(), *([axes for _, axes in cut] for cut in found.cuts.values())]
    for row in rows:
        used = list(chain.from_iterable(row))
        assert len(used) == len(set(used))


@pytest.mark.parametrize("seed", SEEDS)
def test_choice_takes_the_cut_with_the_lowest_price(seed: int) -> None:
    graph, said = random_graph(seed)
    found = completed(graph, MESH, said)
    ops = {op.name: op for op in graph.ops}
    for choice in found.choices:
        op = ops[choice.op]
        prices = {cut: found.prices.price(op, cut, found.specs) for cut, _ in choice.prices}
        assert prices == dict(choice.prices)
        assert prices[found.cuts[op]] == min(prices.values())
        assert len(prices) > 1


# --- GSPMD's priorities -------------------------------------------------------------------------


def product_and_sum(rows: int = 8, inner: int = 8, columns: int = 8) -> ss.Graph:
    """``sum(skip + u w^T)``. ``u`` is computed from an input, as inputs cost nothing to move."""
    builder = ss.GraphBuilder("product_and_sum")
    skip = builder.input("skip", (rows, columns), "float32")
    given = builder.input("given", (rows, inner), "float32")
    (u,) = builder.op("u", "b k -> b k", [given], [((rows, inner), "float32")], "{x0}.tanh()")
    w = builder.parameter("w", (columns, inner), "float32")
    (y,) = builder.op(
        "linear", "b k+, n k+ -> b n", [u, w], [((rows, columns), "float32")],
        "F.linear({x0}, {x1})", flops=2.0,
    )  # fmt: skip
    (z,) = builder.op(
        "add", "b n, b n -> b n", [skip, y], [((rows, columns), "float32")], "{x0} + {x1}"
    )
    (loss,) = builder.op("sum", "b+ n+ -> ()", [z], [((), "float32")], "{x0}.sum()")
    return builder.build(loss)


def test_specs_propagate_from_results_to_operands() -> None:
    found = completed(product_and_sum(), "x:2,y:2", {"add": "d0@x, d1@y"})
    words = {name: str(found.spec(name)) for name in ("skip", "u", "w")}
    assert words == {"skip": "d0@x, d1@y, *@-", "u": "d0@x, *@-", "w": "d0@y, *@-"}


def test_compatible_specs_merge() -> None:
    """A spec of rows and a spec of columns merge into one. A spec with more axes refines a dim."""
    found = completed(product_and_sum(), "x:2,y:2", {"skip": "d0@x", "linear": "d1@y"})
    assert str(found.spec("add")) == "d0@x, d1@y, *@-"
    found = completed(product_and_sum(), "x:2,y:2", {"skip": "d0@x", "u": "d0@x*y"})
    assert [str(found.spec(name)) for name in ("skip", "add")] == ["d0@x, *@-", "d0@x*y, *@-"]


@pytest.mark.parametrize(("rows", "columns", "wanted"), [(4096, 64, "d0"), (64, 4096, "d1")])
def test_smaller_operand_of_a_product_is_gathered(rows: int, columns: int, wanted: str) -> None:
    """One axis cannot cut both rows and columns. Gathering the smaller operand is cheaper."""
    graph = product_and_sum(rows, 512, columns)
    found = completed(graph, "x:4", {"u": "d0@x", "w": "d0@x"})
    assert len(found.choices) == 1
    assert str(found.spec("linear")) == f"{wanted}@x, *@-"


def test_one_of_two_axes_that_cut_the_same_rows_propagates() -> None:
    """One operand has rows cut along x, the other along y. The sum uses one of the two cuts."""
    found = completed(product_and_sum(64, 8, 4096), "x:2,y:2", {"skip": "d0@x", "linear": "d0@y"})
    (choice,) = found.choices
    assert choice.op == "add"
    assert {cut for cut, _ in choice.prices} >= {(("b", ("x",)),), (("b", ("y",)),), ()}
    assert str(found.spec("add")) == "d0@y, *@-"


def test_text_lists_each_choice_with_its_prices() -> None:
    found = completed(product_and_sum(), "x:2", {"u": "d0@x", "w": "d0@x"})
    text = str(found)
    assert "product_and_sum: 2 specs said, 1 choices" in text
    assert "choice: linear: b@x (of " in text
    assert "cannot all be; by price:" in text
    assert "whole" in text


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"u": "d2@x"}, r"u\[8, 8\]: spec 'd2@x' of a tensor with 2 dims: there is no dim 2"),
        ({"u": "d0@z"}, "mesh x:2,y:8 has no axis z"),
        ({"u": "d0@x*y"}, "dim 0 has 8 elements, and mesh x:2,y:8 cuts it into 16"),
        ({"v": "d0@x"}, "product_and_sum has no tensor or op 'v'; it has "),
    ],
)
def test_invalid_spec_is_rejected(specs: dict[str, str], words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        completed(product_and_sum(), "x:2,y:8", specs)
