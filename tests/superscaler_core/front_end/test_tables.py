"""Tables of ops: each name, and each argument that a rule reads, is one of torch's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from superscaler_core.front_end import small_constants, storage
from superscaler_core.front_end.rules import RULES, elementwise, rows, table

TABLES: Mapping[str, Any] = {
    "rules": [name for name in RULES if name.startswith("aten.")],
    "templates": elementwise._TEMPLATES,
    "likes": table.LIKE,
    "fills": small_constants._FILLED,
    "ways back": storage._PUT_BACK,
    "in place": storage._RENAMED,
    "not in place": storage._RENAMED.values(),
}
OF_RULE: dict[Callable[..., Any], list[str]] = {}
for _name in TABLES["rules"]:
    OF_RULE.setdefault(RULES[_name], []).append(_name)


def overloads(name: str) -> list[OpOverload]:
    """The overloads of a name such as ``aten.add``, or the one of ``aten.add.Tensor``."""
    _, base, *which = name.split(".")
    packet = getattr(torch.ops.aten, base)
    return [getattr(packet, one) for one in which or packet.overloads()]


def arguments(names: list[str]) -> set[str]:
    return {a.name for name in names for op in overloads(name) for a in op._schema.arguments}


@pytest.mark.parametrize("name", TABLES)
def test_table_names_ops_that_torch_has(name: str) -> None:
    missing = []
    for entry in TABLES[name]:
        try:
            overloads(entry)
        except AttributeError:
            missing.append(entry)
    assert missing == []


def read_by(rule: Callable[..., Any]) -> Iterator[str]:
    """The arguments that the code of a rule reads: ``call["self"]``, ``call.get("dim")``."""
    for node in ast.walk(ast.parse(inspect.getsource(rule))):
        match node:
            case ast.Subscript(ast.Name("call"), ast.Constant(str(name))) | ast.Call(
                ast.Attribute(ast.Name("call"), "get"), [ast.Constant(str(name)), *_]
            ):
                yield name


@pytest.mark.parametrize("rule", OF_RULE, ids=lambda rule: rule.__name__)
def test_rule_reads_arguments_that_its_ops_have(rule: Callable[..., Any]) -> None:
    assert {*read_by(rule)} <= arguments(OF_RULE[rule])


@pytest.mark.parametrize("name", rows._ARGUMENTS)
def test_every_overload_has_one_of_the_arguments_with_rows(name: str) -> None:
    assert set(rows._ARGUMENTS[name]) <= arguments([name]), "no overload has some argument"
    for op in overloads(name):
        assert set(rows._ARGUMENTS[name]) & {a.name for a in op._schema.arguments}, op


IN_PLACE = [
    f"aten.{name}.{which}"
    for name in dir(torch.ops.aten)
    if name.endswith("_") and isinstance(getattr(torch.ops.aten, name), torch._ops.OpOverloadPacket)
    for which in getattr(torch.ops.aten, name).overloads()
    for op in [getattr(getattr(torch.ops.aten, name), which)]
    if op._schema.is_mutable and str(op._schema.arguments[0].type) == "Tensor"
]


@pytest.mark.parametrize("target", IN_PLACE)
def test_form_that_does_not_write_takes_the_arguments_of_the_form_in_place(target: str) -> None:
    (op,) = overloads(target)
    types = [str(a.type) for a in op._schema.arguments]
    names = [a.name for a in op._schema.arguments]
    node = SimpleNamespace(
        target=target, base=target.rpartition(".")[0], args=dict.fromkeys(names), writes={"self": 0}
    )
    found = storage._without_writes(node)  # type: ignore[arg-type]
    if found:
        (other,) = overloads(found)
        assert [str(a.type) for a in other._schema.arguments] == types
