"""Records: a traced program as plain values, independent of the tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to output ``index`` of the node ``name``, or to the argument ``name``."""

    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class TracedValue:
    """The properties of a tensor that are known without its values."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call of a traced program.

    Attributes:
        name: unique in its program.
        target: the called function, such as ``aten.linear.default``.
        args: all arguments by the names of the schema, with defaults; tensors are ``Ref``s.
        given: names of the arguments that the model passed, and whether by keyword only.
        outputs: the tensors that it returns.
        module: path of the module that called it, ``""`` for the model itself.
        module_type: class of that module.
        is_pointwise: every output element depends only on the input elements at its position.
        is_random: it draws random numbers.
        writes: arguments that it modifies in place, each with the number of the output that is its
            new value.
        shares: for each output, the argument whose memory it shares; None if it has its own. Known
            only in programs in which something is modified in place.
        returns_list: it returns a list or a tuple, maybe of one tensor, or with values that are
            no tensors.
        with_grad: gradients are recorded here.
        is_passed_on: it returns one of its arguments itself, where no gradients are recorded.
        run: computes the call on the CPU, from all arguments by name.
        line: the user's line that calls it, as text; empty if the tracing did not record it.
        is_autocast: it is a cast by ``torch.autocast`` for the op that follows.
        checkpoint: number of the call of ``torch.utils.checkpoint`` that it is in; 0 if in none.
    """

    name: str
    target: str
    args: Mapping[str, Any]
    given: tuple[tuple[str, bool], ...]
    outputs: tuple[TracedValue, ...]
    module: str
    module_type: str
    is_pointwise: bool
    is_random: bool
    writes: Mapping[str, int]
    shares: tuple[Ref | None, ...]
    returns_list: bool
    with_grad: bool
    is_passed_on: bool
    run: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    line: str = ""
    is_autocast: bool = False
    checkpoint: int = 0

    @property
    def base(self) -> str:
        """The target without its overload: ``aten.add`` of ``aten.add.Tensor``."""
        return self.target.rpartition(".")[0]

    @property
    def place(self) -> str:
        """The module of the call, for messages."""
        return place_of(self.module, self.module_type)


def place_of(path: str, kind: str) -> str:
    """A module by its path and class, for messages."""
    return f"module {path!r} ({kind})" if path else "the model itself"


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in an argument of a call, or in lists, tuples and mappings of arguments."""
    if isinstance(value, list | tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_of(inner)
    else:
        yield value


def refs_in(value: Any) -> Iterator[Ref]:
    """The tensors among the leaves of a value."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Ref))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with other leaves; its tuples become lists."""
    if isinstance(value, Mapping):
        return {name: mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(inner, change) for inner in value]
    return change(value)


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A traced model: ``nodes`` compute ``outputs`` from the tensors named in the other fields.

    Attributes:
        inputs: arguments of the model, in their order.
        parameters: for each argument that is a parameter, its name in the model.
        buffers: for each argument that is a buffer, its name in the model.
        constants: other tensors found by tracing, with their names in the model and their values.
        nodes: in an order that follows the data flow.
        outputs: the results of the model.
    """

    inputs: tuple[tuple[str, TracedValue], ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, tuple[str, Any]]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
