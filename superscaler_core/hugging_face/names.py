"""Names: the tensors of a model's folder as the parameters of the model.

Transformers renames, stacks, joins and cuts tensors of a folder when it loads them: experts of
their own become one stacked weight. Its table says how; here each of its operations on values is
one on stored tensors, so that a rank reads only its boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from rvdcomm.checkpoint import Concat, Split, Stack, StoredTensor, Transpose
from superscaler_core.errors import PlanError
from superscaler_core.ops.stacked_experts import StackedExperts

Tensors = Mapping[str, StoredTensor]

Patterns = dict[str, list[StoredTensor]]
"""The tensors that stand for a pattern of names, in their order."""


def as_parameters(model: nn.Module, tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors of a folder by the names that the model has, as transformers would load them.

    Args:
        model: the model; one that is not of transformers has the names of the folder.
        tensors: the tensors of the folder.

    Raises:
        PlanError: transformers converts some by an operation that is not known here.
    """
    table = _conversions(model)
    if table is None:
        return _with_stacked(model, dict(tensors))
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    converters = [each for each in table if isinstance(each, WeightConverter)]
    renamings = [each for each in table if not isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = dict.fromkeys(model.state_dict(), 0)
    found: dict[str, StoredTensor] = {}
    joined: dict[str, tuple[Any, Patterns]] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, getattr(model, "base_model_prefix", None), state
        )
        if pattern is None:
            found[target] = replace(tensors[name], name=target)
            continue
        _, sources = joined.setdefault(target, (of_pattern[pattern], {}))
        sources.setdefault(pattern, []).append(tensors[name])
    for target, (converter, sources) in joined.items():
        found |= _converted(model, target, converter, sources)
    return _with_stacked(model, found)


def _with_stacked(model: nn.Module, found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors, with those of listed experts stacked where the model has them stacked."""
    for path, module in model.named_modules():
        if not isinstance(module, StackedExperts):
            continue
        keys = module.keys() or range(module.num)
        for name, _ in module.named_parameters():
            parts = [f"{path}.{key}.{name}" for key in keys]
            if all(part in found for part in parts):
                stacked = _stack([found.pop(part) for part in parts], 0)
                found[f"{path}.{name}"] = replace(stacked, name=f"{path}.{name}")
    return found


def _conversions(model: Any) -> list[Any] | None:
    """The entries of transformers' table for a model; None if it is no model of transformers."""
    if not hasattr(model, "save_pretrained"):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping

    # Entries remember whether they were used.
    found: list[Any] = deepcopy(get_model_conversion_mapping(model))
    return found


def _converted(
    model: nn.Module, target: str, converter: Any, sources: Patterns
) -> dict[str, StoredTensor]:
    """The parameters that a converter makes, by name."""
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind not in OPERATIONS:
            raise PlanError(
                f"{target}: transformers converts the folder's tensors by {kind}, which is not "
                f"known here ({', '.join(OPERATIONS)} are): load the folder by from_pretrained on "
                "one process, save it by save_pretrained(..., save_original_format=False), and "
                "give that folder."
            )
        sources = OPERATIONS[kind](_Call(operation, converter, model, target), sources)
    # Operations give patterns, which are a part of the name.
    full = target.replace("*.", "0.")
    part = next((pattern for pattern in sources if pattern in full), full)
    prefix, _, suffix = full.partition(part)
    made = {f"{prefix}{pattern}{suffix}": of[0] for pattern, of in sources.items()}
    return {name: replace(tensor, name=name) for name, tensor in made.items()}


class _Call:
    """One operation of a converter, on tensors of one target."""

    def __init__(self, operation: Any, converter: Any, model: nn.Module, target: str) -> None:
        self.dim = getattr(operation, "dim", 0)
        self.operation, self.model, self.target = operation, model, target
        self.patterns: Sequence[str] = converter.source_patterns
        self.targets: Sequence[str] = converter.target_patterns

    def parts(self) -> list[str]:
        """The patterns of the parts into which a tensor is cut."""
        attribute = self.operation.num_shards_attribute
        if attribute is None:
            return list(self.targets)
        config: Any = self.model.config
        num = getattr(config.get_text_config(), attribute)
        return [self.targets[0].replace("*", str(number)) for number in range(num)]

    def sizes(self) -> list[int]:
        """The sizes of these parts, as the model's parameters have them."""
        names = (self.target.replace(self.targets[0], part) for part in self.targets)
        return [self.model.get_parameter(name).shape[self.dim] for name in names]


def _stacked(call: _Call, sources: Patterns) -> Patterns:
    names = list(sources) if len(sources) > 1 else [call.targets[0]]
    made = (_stack(tensors, call.dim) for tensors in sources.values())
    return {name: [tensor] for name, tensor in zip(names, made, strict=True)}


def _concatenated(call: _Call, sources: Patterns) -> Patterns:
    parts = [tensor for pattern in call.patterns for tensor in sources.get(pattern, [])]
    if len(parts) == 1:
        return {call.targets[0]: parts}
    named = {f"t.{number}": replace(t, name=f"t.{number}") for number, t in enumerate(parts)}
    return {call.targets[0]: [Concat("t", tuple(named), call.dim).apply(named)["t"]]}


def _chunked(call: _Call, sources: Patterns) -> Patterns:
    return _cut(call, sources, call.parts(), ())


def _split(call: _Call, sources: Patterns) -> Patterns:
    return _cut(call, sources, call.targets, call.sizes())


def _cut(call: _Call, sources: Patterns, parts: Sequence[str], sizes: Sequence[int]) -> Patterns:
    ((tensor,),) = sources.values()
    names = tuple(f"t.{number}" for number in range(len(parts)))
    cut = Split("t", names, call.dim, tuple(sizes)).apply({"t": replace(tensor, name="t")})
    return {part: [cut[name]] for part, name in zip(parts, names, strict=True)}


def _transposed(call: _Call, sources: Patterns) -> Patterns:
    ((tensor,),) = sources.values()
    name = call.targets[0] if len(call.targets) == 1 else call.patterns[0]
    is_right = tensor.shape == tuple(call.model.get_parameter(call.target).shape)
    if call.operation.check_dims and is_right:
        return {name: [tensor]}
    dims = list(range(len(tensor.shape)))
    a, b = call.operation.dim0, call.operation.dim1
    dims[a], dims[b] = dims[b], dims[a]
    turned = Transpose("t", tuple(dims)).apply({"t": replace(tensor, name="t")})
    return {name: [turned["t"]]}


def _stack(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    named = {f"t.{number}": replace(t, name=f"t.{number}") for number, t in enumerate(tensors)}
    return Stack("t", "t.#", dim).apply(named)["t"]


OPERATIONS: Mapping[str, Callable[[_Call, Patterns], Patterns]] = {
    "MergeModulelist": _stacked,
    "Concatenate": _concatenated,
    "Chunk": _chunked,
    "Split": _split,
    "Transpose": _transposed,
}
"""Operations of transformers' converters, by the names of their classes, on stored tensors."""
