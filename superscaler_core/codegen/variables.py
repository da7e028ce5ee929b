"""Variables: the names and expressions of a device's values in a generated file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import rvdcomm as rv
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.statement import Expression
from superscaler_core.codegen.text import index_text
from superscaler_core.program.flow import Flow, Held
from superscaler_core.program.value import Role, Value
from superscaler_core.quoted import quoted


@dataclass(frozen=True, slots=True)
class Variable:
    """A value in a generated file.

    Attributes:
        value: the value.
        name: name of its variable.
        box: the box of the graph's tensor that it holds.
        has_grad: whether its gradient is needed where it is passed.
        text: the expression for it in a stage function.
    """

    value: Value
    name: str
    box: rv.Box
    has_grad: bool
    text: str


class Variables:
    """The variables of one device; a value keeps its first name.

    Args:
        names: the names of the device's file.
        mb: the expression of the microbatch's number.
    """

    def __init__(self, names: Names, mb: str) -> None:
        self._names, self._mb = names, mb

    def add(self, flow: Flow) -> None:
        """Name the values of a stage: first all results, then what else is read."""
        for held in flow.all:
            self.of(held)

    def of(self, held: Held) -> Variable:
        """The variable of a value."""
        value = held.value
        name = self._names.of(value, self._wish(held))
        text = _CALLS[value.role](held, self._mb) if value.role in _CALLS else name
        return Variable(value, name, held.box, held.has_grad, text)

    def all(self, given: Iterable[Held]) -> list[Variable]:
        """The variables of these values."""
        return [self.of(held) for held in given]

    @staticmethod
    def _wish(held: Held) -> str:
        if held.value.role is Role.ARRIVED:
            return f"{held.tensor.name}_{held.value.name}"
        return held.tensor.name


def _use(held: Held, _: str) -> str:
    return f"run.use({quoted(held.value.name)})"


_CALLS: Mapping[Role, Callable[[Held, str], str]] = {
    Role.INPUT: lambda held, mb: f"run.input({quoted(held.value.name)}, {mb})",
    Role.CONSTANT: lambda held, _: f"run.constant({quoted(held.tensor.name)})",
    Role.STATE: lambda held, mb: f"run.state({quoted(held.tensor.name)}, {mb})",
    Role.WEIGHT: _use,
    Role.COPY: _use,
}
"""For values that no instruction of a stage makes, the calls that return them."""


def combined(box: rv.Box, sources: Sequence[Variable]) -> Expression:
    """The sum, in ``box``, of values that each hold a part of it."""
    names = tuple(value.name for value in sources)
    if len(sources) == 1:
        return Expression(names[0] + index_text(box, sources[0].box), names)
    if all(value.box.contains(box) for value in sources):
        terms = " + ".join(v.name + index_text(box, v.box) for v in sources)
        return Expression(f"({terms})", names)
    pieces = ", ".join(f'({v.name}, "{v.box}")' for v in sources)
    return Expression(f'ops.join("{box}", [{pieces}])', names)
