"""Batch: what the tensors of a step mean: where their samples are, and what each rank passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall

Kind = Literal["whole", "local"]
Check = Literal["first", "every", "never"]


@dataclass(frozen=True)
class Batch:
    """What every rank passes to ``step`` and ``evaluate``.

    Attributes:
        dims: the dim of each input that has the samples, by the name of the argument (or
            ``argument.key`` inside a dict or list); None for an input that belongs to all samples,
            such as a table of positions. An input that is not named has its samples along dim 0,
            if it has as many indices there as the batch has samples.
        kind: "whole": all ranks pass the same whole batch. "local": each rank passes samples of its
            own, and the whole batch is their concatenation in rank order. Ranks that share the work
            on the same samples, as in tensor parallelism, pass equal ones.
        check: when ranks compare a hash of the values that have to be equal: at the "first" call of
            each shape, at "every" call, or "never". Shapes are compared at every call.

    >>> Batch(dims={"x": 1, "positions": None})
    Batch(dims={'x': 1, 'positions': None}, kind='whole', check='first')
    """

    dims: Mapping[str, int | None] = field(default_factory=dict, hash=False)
    kind: Kind = "whole"
    check: Check = "first"

    def __post_init__(self) -> None:
        for name, values in (("kind", get_args(Kind)), ("check", get_args(Check))):
            if getattr(self, name) not in values:
                raise PlanError(
                    f"Batch takes {name} = {' or '.join(map(repr, values))}, not "
                    f"{getattr(self, name)!r}."
                )
        is_mapping = isinstance(self.dims, Mapping)
        if not is_mapping or not all(isinstance(d, int | None) for d in self.dims.values()):
            raise PlanError(
                'Batch takes dims = {"x": 1, "table": None}, the dim of samples of each input by '
                f"its name, not {self.dims!r}."
            )

    @property
    def is_local(self) -> bool:
        """Whether every rank passes samples of its own."""
        return self.kind == "local"


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call, with their names and the dims of their samples.

    Attributes:
        names: for example ``tokens``, or ``images.left`` inside a dict.
        tensors: in the order of the graph's inputs.
        dims: the dim of each tensor that has the samples; None if it has none.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, batch: Batch, model: nn.Module, call: ModelCall) -> Inputs:
        """The inputs of a call.

        Raises:
            PlanError: ``batch.dims`` names an input that the call does not have, or a dim that the
                input does not have.
        """
        names, tensors = names_of(model, call), call.tensors
        said = {name: _said(batch.dims, name) for name in names}
        known = {key for key, _ in filter(None, said.values())}
        if unknown := [name for name in batch.dims if name not in known]:
            near = get_close_matches(unknown[0], names, 1)
            hint = f" Is it {near[0]}?" if near else ""
            raise PlanError(
                f"Batch.dims names {', '.join(map(repr, unknown))}; the call has tensors "
                f"{', '.join(map(repr, names))}.{hint}"
            )
        # By position: tensors in dicts may have one name, as of the keys 1 and "1".
        given = {
            i: _dim(name, found[1], tensor)
            for i, (name, tensor) in enumerate(zip(names, tensors, strict=True))
            if (found := said[name]) is not None
        }
        sizes = {tensors[i].shape[dim] for i, dim in given.items() if dim is not None}
        for i, tensor in enumerate(tensors):
            is_batch = tensor.dim() and (not sizes or tensor.shape[0] in sizes)
            given.setdefault(i, 0 if is_batch else None)
        return cls(names, tensors, tuple(given[i] for i in range(len(names))))

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples that each input with samples has, by name."""
        return {
            name: tensor.shape[dim]
            for name, tensor, dim in zip(self.names, self.tensors, self.dims, strict=True)
            if dim is not None
        }

    def can_cut(self, num: int) -> bool:
        """Whether all inputs have the same number of samples, which ``num`` divides."""
        sizes = {*self.sizes.values()}
        return num == 1 or (len(sizes) == 1 and sizes.pop() % num == 0)

    def check_cut(self, num: int) -> None:
        """Refuse to cut the batch into ``num`` microbatches.

        Raises:
            PlanError: the samples cannot be cut.
        """
        if not self.can_cut(num):
            sizes = ", ".join(f"{size} in {name}" for name, size in self.sizes.items())
            raise PlanError(
                f"the plan cuts a step into {num} microbatches, and the batch has tensors {self}: "
                f"every tensor has to have the same number of samples, a multiple of {num}; there "
                f"are {sizes}. If an input has its samples along another dim than 0, or belongs to "
                'all samples, say so, such as batch=ss.Batch(dims={"x": 1, "table": None}).'
            )

    def microbatch(self, call: ModelCall, num: int) -> ModelCall:
        """The call with the first of ``num`` microbatches.

        Raises:
            PlanError: the samples cannot be cut.
        """
        self.check_cut(num)

        def first(tensor: Tensor, dim: int) -> Tensor:
            return tensor.narrow(dim, 0, tensor.shape[dim] // num)

        return call if num == 1 else self._changed(call, first)

    def repeated(self, call: ModelCall) -> ModelCall:
        """The call with every sample twice."""
        return self._changed(call, lambda tensor, dim: torch.cat([tensor, tensor], dim))

    def of_size(self, call: ModelCall, size: int) -> ModelCall:
        """The call with another number of samples, whose values are missing."""

        def sized(tensor: Tensor, dim: int) -> Tensor:
            shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
            return tensor.new_empty(()).expand(shape)

        return self._changed(call, sized)

    def _changed(self, call: ModelCall, change: Callable[[Tensor, int], Tensor]) -> ModelCall:
        """The call with other tensors in place of those with samples, given with their dims."""
        dims = iter(self.dims)

        def changed(tensor: Tensor) -> Tensor:
            dim = next(dims)
            return tensor if dim is None else change(tensor, dim)

        return call.map(changed)

    @property
    def without_sizes(self) -> str:
        """As ``str``, without the number of samples."""
        return ", ".join(
            f"{name} {['*' if i == dim else size for i, size in enumerate(tensor.shape)]}"
            for name, tensor, dim in zip(self.names, self.tensors, self.dims, strict=True)
        )

    def __str__(self) -> str:
        named = zip(self.names, self.tensors, strict=True)
        return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named)


def names_of(model: nn.Module, call: ModelCall) -> tuple[str, ...]:
    """The names of a call's tensors, in their order."""
    parameters = inspect.signature(model.forward).parameters.values()
    placed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [
        (placed[i] if i < len(placed) else f"args.{i - len(placed)}", value)
        for i, value in enumerate(call.args)
    ]
    return tuple(
        ".".join([name, *map(_key, path)])
        for name, value in [*named, *call.kwargs.items()]
        for path, leaf in pytree.tree_leaves_with_path(value)
        if isinstance(leaf, Tensor)
    )


def _key(entry: object) -> str:
    """The text of one step of a path into a structure."""
    fields = ("key", "idx", "name")
    return str(next((getattr(entry, f) for f in fields if hasattr(entry, f)), entry))


def _said(dims: Mapping[str, int | None], name: str) -> tuple[str, int | None] | None:
    """The entry of ``dims`` for an input, or for the innermost structure that it is in."""
    path = name.split(".")
    keys = (".".join(path[:i]) for i in range(len(path), 0, -1))
    return next(((key, dims[key]) for key in keys if key in dims), None)


def _dim(name: str, dim: int | None, tensor: Tensor) -> int | None:
    """A dim counted from the front."""
    if dim is None:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise PlanError(
            f"Batch.dims says that dim {dim} of {name!r} has the samples, and {name!r} is "
            f"{list(tensor.shape)}."
        )
    return dim % tensor.dim()
