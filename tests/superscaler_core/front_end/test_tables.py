"""Tables of ops: each name, and each argument that a rule reads, is one of torch's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload

from superscaler_core.front_end import small_constants, storage
from superscaler_core.rules import RULES, elementwise, rows, table

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


def test_table_names_ops_that_torch_has() -> None:
    missing = []
    for name, entry in ((name, entry) for name, names in TABLES.items() for entry in names):
        try:
            overloads(entry)
        except AttributeError:
            missing.append((name, entry))
    assert missing == []


def read_by(rule: Callable[..., Any]) -> Iterator[str]:
    """The arguments that the code of a rule reads: ``call["self"]``, ``call.get("dim")``."""
    for node in ast.walk(ast.parse(inspect.getsource(rule))):
        match node:
            case ast.Subscript(ast.Name("call"), ast.Constant(str(name))) | ast.Call(
                ast.Attribute(ast.Name("call"), "get"), [ast.Constant(str(name)), *_]
            ):
                yield name


def test_rule_reads_arguments_that_its_ops_have() -> None:
    unknown = {rule.__name__: {*read_by(rule)} - arguments(OF_RULE[rule]) for rule in OF_RULE}
    assert {rule: names for rule, names in unknown.items() if names} == {}


def test_every_overload_has_one_of_the_arguments_with_rows() -> None:
    unknown = {name: {*of_rows} - arguments([name]) for name, of_rows in rows._ARGUMENTS.items()}
    assert {name: names for name, names in unknown.items() if names} == {}
    without = [
        op
        for name, of_rows in rows._ARGUMENTS.items()
        for op in overloads(name)
        if not {*of_rows} & {a.name for a in op._schema.arguments}
    ]
    assert without == []


def in_place() -> Iterator[str]:
    """The ops whose names end in an underscore, which write their first argument."""
    # Not ``dir(torch.ops.aten)``, which has only the ops that were used before.
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("aten::")}  # fmt: skip
    for name in sorted({name.partition(".")[0] for name in names}):
        if name.endswith("_") and not name.endswith("__"):
            for op in overloads(f"aten.{name}"):
                if op._schema.is_mutable and str(op._schema.arguments[0].type) == "Tensor":
                    yield str(op)


REFUSED = {
    *("aten.copy_.Tensor", "aten.copy_.float", "aten.copy_.int"),  # no Python code calls these
    *("aten.fill_diagonal_.default", "aten.polygamma_.default", "aten.transpose_.default"),
    *("aten.requires_grad_.default", "aten.set_.source_Tensor_storage_offset"),
}
"""Public ops in place without a form that takes the same arguments; capture refuses them."""


def test_forms_in_place_have_forms_that_do_not_write() -> None:
    missing = set()
    for target in in_place():
        (op,) = overloads(target)
        args = dict.fromkeys(a.name for a in op._schema.arguments)
        node = SimpleNamespace(
            target=target, base=target.rpartition(".")[0], args=args, writes={"self": 0}
        )
        if not storage._without_writes(node):  # type: ignore[arg-type]
            missing.add(target)
    assert {target for target in missing if not target.startswith("aten._")} <= REFUSED
