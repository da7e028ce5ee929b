"""ATen ops by name: records of their calls, with the properties that torch states for each op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from superscaler_core.rules.records import Node, TracedValue, leaves_of, mapped


def overload(target: str) -> OpOverload | None:
    """The op of a name such as ``aten.add.Tensor``; None if there is none."""
    namespace, name, which = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, which, None)


def is_mutable(target: str) -> bool:
    """Whether an op's schema says that it modifies an argument."""
    op = overload(target)
    return op is not None and bool(op._schema.is_mutable)


def overload_with(base: str, names: Sequence[str]) -> str:
    """The overload of an op that has exactly these arguments; empty if there is none."""
    namespace, name = base.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    found = (f"{base}.{which}" for which in packet.overloads())
    return next((target for target in found if arguments(target) == list(names)), "")


def schema(target: str) -> Sequence[Any]:
    """An op's arguments, as torch describes them."""
    op = overload(target)
    assert op is not None, target
    made: Sequence[Any] = op._schema.arguments
    return made


def arguments(target: str) -> list[str]:
    """Names of an op's arguments."""
    return [a.name for a in schema(target)]


def takes_same(target: str, other: str) -> bool:
    """Whether there is an op ``target``, with arguments of the types of those of ``other``."""
    one, two = overload(target), overload(other)
    if one is None or two is None:
        return False
    mine, others = ([str(a.type) for a in op._schema.arguments] for op in (one, two))
    return mine == others


def call(
    like: Node, name: str, target: str, args: Mapping[str, Any], *outputs: TracedValue
) -> Node:
    """Another call, at the place of ``like`` in the model, of an op that writes nothing in place.

    Its ``name`` is unique in the program; arguments that are not in ``args`` have their defaults.
    """
    op = overload(target)
    assert op is not None, target
    schema = op._schema.arguments
    return replace(
        like,
        name=name,
        target=target,
        args={a.name: args.get(a.name, a.default_value) for a in schema},
        given=tuple((a.name, a.kwarg_only) for a in schema if a.name in args),
        outputs=outputs,
        is_pointwise=torch.Tag.pointwise in op.tags,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        writes={},
        shares=(None,) * len(outputs),
        returns_list=False,
        is_passed_on=False,
        run=Runner(op),
    )


@dataclass(frozen=True)
class Runner:
    """Computes an op on the CPU, or without values, from all its arguments by name."""

    op: Any

    def __call__(self, args: Mapping[str, Any]) -> tuple[Tensor, ...]:
        # If an argument has no value, the results have none, too.
        is_meta = any(isinstance(v, Tensor) and v.is_meta for v in leaves_of(args))

        def placed(value: Any) -> Any:
            if isinstance(value, torch.device):
                return "meta" if is_meta else "cpu"
            return value.to("meta") if isinstance(value, Tensor) and is_meta else value

        values = mapped(args, placed)
        schema: Sequence[Any] = self.op._schema.arguments
        positional = [values[a.name] for a in schema if not a.kwarg_only]
        keywords = {a.name: values[a.name] for a in schema if a.kwarg_only}
        with torch.no_grad():
            result = self.op(*positional, **keywords)
        found = result if isinstance(result, list | tuple) else (result,)
        return tuple(x for x in found if isinstance(x, Tensor))


def value_of(tensor: Tensor) -> TracedValue:
    """Shape and dtype of a tensor."""
    return TracedValue(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
