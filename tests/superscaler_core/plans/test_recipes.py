"""Recipes: they are short, call the three primitives, and ignore the names of modules."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.models import MODELS, build, config_of
from superscaler_core.plan import Chosen
from superscaler_core.plans import PLANS, fill
from tests.superscaler_core.plans.renamed import renamed

TRANS, ASSIGN, ORDER = "op_trans", "op_assign", "op_order"

RECIPES = {
    "data_parallel": {TRANS, ASSIGN},
    "megatron": {TRANS, ASSIGN},
    "coshard": {TRANS, ASSIGN, ORDER},
    "interlaced": {TRANS, ASSIGN, ORDER},
    "nf1b": {TRANS, ASSIGN, ORDER},
}
"""The paper's algorithms, and the primitives that each calls itself."""

MOST_LINES = 25


def module_of(name: str) -> ModuleType:
    found = inspect.getmodule(PLANS[name])
    assert found is not None
    return found


def code_lines(tree: ast.Module) -> set[int]:
    """The lines of a file that are code: no imports, docstrings, comments or empty lines."""
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    texts = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    lines = {
        line
        for node in body
        for inner in ast.walk(node)
        if isinstance(inner, ast.stmt | ast.expr | ast.arg | ast.keyword | ast.alias)
        for line in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
    }
    return lines - {
        line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def counted(source: str) -> int:
    """The code lines of a file that are not empty, and not a comment alone."""
    rows = source.splitlines()
    lines = code_lines(ast.parse(source))
    return sum(bool(rows[n - 1].strip()) and not rows[n - 1].strip().startswith("#") for n in lines)


def test_counted_ignores_imports_docstrings_comments_and_blank_lines() -> None:
    source = '''"""Docs."""
import os


def f(
    a: int,
) -> None:
    """Docs.

    More.
    """
    # Why.
    for _ in range(a):
        g(
            1,
        )

'''
    assert counted(source) == 3 + 4


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_at_most_25_lines_of_code(name: str) -> None:
    """All lines of the file count, including those of helpers."""
    assert counted(inspect.getsource(module_of(name))) <= MOST_LINES


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_call_the_primitives_directly(name: str) -> None:
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(inspect.getsource(PLANS[name])))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "plan"
    }
    assert calls >= RECIPES[name]


# --- other names --------------------------------------------------------------------------------

CASES = [
    ("gpt", "megatron", {"vocabulary": True}),
    ("gpt", "hybrid", {"tp": 2, "pp": 2, "keep": ss.Keep.ATTENTION_ONLY}),
    ("moe", "expert_parallel", {}),
    ("mbart", "interlaced", {}),
    ("swin", "coshard", {"blocks": range(2)}),
]  # fmt: skip
SIZES = {"gpt": {"layers": 4}, "moe": {"layers": 4}, "mlp": {"layers": 6, "hidden": 12}}


def captured(name: str, change: Callable[[torch.nn.Module], torch.nn.Module]) -> ss.Graph:
    sizes = SIZES.get(name, {})
    inputs = MODELS[name].example_inputs(
        config_of(name, "tiny", **sizes), 4, torch.Generator().manual_seed(0)
    )
    model = change(build(name, **sizes))
    return ss.capture(model, inputs, recycled=MODELS[name].recycled)


def by_number(plan: ss.Plan) -> list[Any]:
    """What a plan decides, with ops by their number in the graph."""
    said = plan.decisions
    ops = (*plan.graph.ops, *plan.graph.updates.values())
    numbers = {op.name: number for number, op in enumerate(ops)}

    def group(chosen: Iterable[Chosen]) -> list[object]:
        return [(numbers[one.op], one.part) for one in chosen]

    return [
        {numbers[name]: parts for name, parts in said.parts.items()},
        [numbers[name] for name in said.stages],
        said.schedule,
        list(map(group, said.orders)),
        [
            list(map(group, groups))
            for groups in (said.recomputed, said.recompute_regions, said.offloaded)
        ],
        [(group(ops), gathers) for ops, gathers in said.fsdp_units],
    ]


@pytest.mark.parametrize(("model", "name", "options"), CASES)
def test_decisions_do_not_depend_on_module_names(
    model: str, name: str, options: dict[str, object]
) -> None:
    found = []
    for change in (lambda module: module, renamed):
        plan = ss.Plan(captured(model, change), range(4))
        fill(plan, PLANS[name], options)
        found.append(by_number(plan))
    assert len(found[0][0]) > 10
    assert found[0] == found[1]
