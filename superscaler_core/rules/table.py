"""The table of rules, by the names of ATen ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall
from superscaler_core.rules.records import Node, Ref
from superscaler_core.rules.register import REGISTERED

Rule = Callable[[RuleCall], PTensor | Sequence[PTensor]]
"""Adds the ops of one call to the graph and returns its results."""

LIKE = {
    "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like",
    "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty",
    "aten.copy", "aten.fill", "aten.zero",
}  # fmt: skip
"""Ops that read only the shape and dtype of their argument, so that their results are constants."""

RULES: dict[str, Rule] = {}
"""Rules by ``aten.name`` or, where overloads differ, ``aten.name.overload``."""


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Enter a function as the rule of these targets.

    The function gets a ``RuleCall`` and returns the results of the call, as tensors of the graph.
    Parts of the ops that it adds have to be exact: if a loop marked ``+`` is cut, each part
    computes its partial sum of the output, and autograd through the part gives its share of the
    gradients.
    """

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return enter


def has_rule(node: Node) -> bool:
    """Whether there is a rule for a call."""
    return _found(node) is not None


def is_covered(node: Node) -> bool:
    """Whether a call, in the form that writes nothing in place, has a rule or makes a constant."""
    if node.writes:
        base, _, overload = node.target.rpartition(".")
        node = replace(node, target=f"{base.removesuffix('_')}.{overload}")
    reads = any(isinstance(v, Ref | list) for v in node.args.values())
    return not reads or node.base in LIKE or has_rule(node)


def rule_of(call: RuleCall) -> Rule:
    """The rule of a call.

    Raises:
        NoRuleError: no rule covers the call.
    """
    found = _found(call.node)
    if found is None:
        raise call.error("there is no rule that says how it splits.")
    return found


def _found(node: Node) -> Rule | None:
    if node.base in REGISTERED:
        return RULES["registered"]
    found = RULES.get(node.target) or RULES.get(node.base)
    if found is None and node.is_pointwise and not node.is_random:
        return RULES["pointwise"]
    return found
