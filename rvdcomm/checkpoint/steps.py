"""Steps: how the tensors of a checkpoint are cut, joined, turned and padded on their way.

A step maps tensors to tensors. It moves no data: a ``StoredBlock`` of the result says which box of
which stored array has its elements, so the result is read by ranges like any stored tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rvdcomm.checkpoint.stored import StoredBlock, StoredTensor
from rvdcomm.checkpoint.template import Template
from rvdcomm.checkpoint.views import moved, permuted, with_dim, with_value, without_dim
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Box
from rvdcomm.text import quoted

Tensors = Mapping[str, StoredTensor]

_MAX_DIGITS = 20
"""Most digits of the number of a part that are read."""


def toml_text(value: str | int | tuple[Any, ...]) -> str:
    """A text, a number or a list of these, in TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    # TOML has JSON's texts, but for two: it takes no DEL and no escaped surrogates.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class RuleStep:
    """A step of ``Rules``: one line of the table ``[kind]``, whose key is ``names``.

    Laws (tests/checkpoint/test_steps.py): ``Rules.parse(str(Rules(steps=[x]))).steps == (x,)``;
    ``Concat`` undoes ``Split``, ``Stack`` undoes ``Unstack``, ``Crop`` undoes ``Pad``.

    Args:
        names: a template of names (``Template``): ``*`` stands for any text, ``#`` for a number.

    Raises:
        LayoutError: the values are no step, or, from ``apply``, fit no tensor.
    """

    names: str

    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()

    def apply(self, tensors: Tensors) -> dict[str, StoredTensor]:
        """The tensors after this step, by name."""
        if not self._found(tensors):
            raise LayoutError(
                f"{self} matches no tensor; the {len(tensors)} tensors have names such as "
                f"{quoted(sorted(tensors)[:3])[1:-1]}."
            )
        out = dict(tensors)
        for taken, made in self._moves(tensors):
            for name in taken:
                del out[name]
            for tensor in made:
                if tensor.name in out:
                    raise LayoutError(f"{self} makes {tensor.name!r}, which there is already.")
                out[tensor.name] = tensor
        return out

    def _moves(self, tensors: Tensors) -> Iterator[tuple[list[str], list[StoredTensor]]]:
        """Names of tensors that the step takes, with the tensors that it makes of them."""
        for name, found in self._found(tensors).items():
            yield [name], self._made(tensors[name], found)

    def _made(self, tensor: StoredTensor, found: tuple[str, ...]) -> list[StoredTensor]:
        raise NotImplementedError

    def _found(self, tensors: Tensors) -> dict[str, tuple[str, ...]]:
        """The names that match, each with the texts for the wildcards."""
        template = Template(self.names)
        return {n: found for n in tensors if (found := template.match(n)) is not None}

    def _dim(self, tensor: StoredTensor, dim: int) -> int:
        if not 0 <= dim < len(tensor.shape):
            raise LayoutError(f"{self}: {tensor.name!r} {list(tensor.shape)} has no dim {dim}.")
        return dim

    def __str__(self) -> str:
        return f"[{self.kind}] {self.line}"

    @property
    def line(self) -> str:
        """The line of the table, in TOML: the names, and the values that are not the default."""
        defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
        given = {key: value for key in self.keys if (value := getattr(self, key)) != defaults[key]}
        values = ", ".join(f"{key} = {toml_text(value)}" for key, value in given.items())
        return f"{toml_text(self.names)} = {{{values}}}"


@dataclass(frozen=True)
class Split(RuleStep):
    """Cuts a tensor along a dim, such as fused q, k and v.

    Args:
        parts: templates of the names of the parts, with the wildcards of ``names``.
        dim: the dim.
        sizes: shares of the parts, such as ``(4, 1, 1)``; equal by default.
        groups: the dim consists of so many equal groups, and each has its share of every part:
            heads of which each has its q, k and v.
    """

    parts: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] = ()
    groups: int = 1

    kind: ClassVar[str] = "split"
    keys: ClassVar[tuple[str, ...]] = ("parts", "dim", "sizes", "groups")

    def __post_init__(self) -> None:
        _check_parts(self, self.parts, 2)
        shares = self.sizes or (1,) * len(self.parts)
        if len(shares) != len(self.parts) or min(*shares, self.groups) < 1:
            raise LayoutError(
                f"{self}: give a size of at least 1 for each part, and 1 or more groups."
            )

    def _made(self, tensor: StoredTensor, found: tuple[str, ...]) -> list[StoredTensor]:
        dim, shares = self._dim(tensor, self.dim), self.sizes or (1,) * len(self.parts)
        unit, rest = divmod(tensor.shape[dim], self.groups * sum(shares))
        if rest:
            raise LayoutError(
                f"{self}: dim {dim} of {tensor.name!r} {list(tensor.shape)} has "
                f"{tensor.shape[dim]} elements, no multiple of {self.groups * sum(shares)} "
                f"({self.groups} groups of {'+'.join(map(str, shares))})."
            )
        made, before = [], 0
        for part, share in zip(self.parts, shares, strict=True):
            size = share * unit
            starts = [(g * sum(shares) + before) * unit for g in range(self.groups)]
            pieces = [(start, start + size, g * size) for g, start in enumerate(starts)]
            shape = with_value(tensor.shape, dim, size * self.groups)
            blocks = moved(tensor.blocks, dim, pieces)
            made.append(_tensor(Template(part).filled(found), shape, blocks, tensor))
            before += share
        return made


@dataclass(frozen=True)
class Concat(RuleStep):
    """Joins tensors along a dim; undoes ``Split``.

    Args:
        parts: templates of the names of the parts, with the wildcards of ``names``.
        dim: the dim.
        groups: the result consists of so many equal groups, each with its share of every part.
    """

    parts: tuple[str, ...]
    dim: int = 0
    groups: int = 1

    kind: ClassVar[str] = "concat"
    keys: ClassVar[tuple[str, ...]] = ("parts", "dim", "groups")

    def __post_init__(self) -> None:
        _check_parts(self, self.parts, 2)
        if self.groups < 1:
            raise LayoutError(f"{self}: give 1 or more groups.")

    def _found(self, tensors: Tensors) -> dict[str, tuple[str, ...]]:
        first = Template(self.parts[0])
        return {n: found for n in tensors if (found := first.match(n)) is not None}

    def _moves(self, tensors: Tensors) -> Iterator[tuple[list[str], list[StoredTensor]]]:
        for found in self._found(tensors).values():
            names = [Template(part).filled(found) for part in self.parts]
            parts = _all(self, tensors, names)
            yield names, [self._joined(parts, Template(self.names).filled(found))]

    def _joined(self, parts: list[StoredTensor], name: str) -> StoredTensor:
        dim = self._dim(parts[0], self.dim)
        _check_alike(self, parts, [with_value(part.shape, dim, 0) for part in parts])
        sizes = [part.shape[dim] for part in parts]
        if odd := [p for p in parts if p.shape[dim] % self.groups]:
            raise LayoutError(
                f"{self}: dim {dim} of {odd[0].name!r} {list(odd[0].shape)} is not cut into "
                f"{self.groups} equal groups."
            )
        blocks: list[StoredBlock] = []
        for i, part in enumerate(parts):
            size, group, before = sizes[i] // self.groups, sum(sizes) // self.groups, sum(sizes[:i])
            pieces = [
                (g * size, (g + 1) * size, g * group + before // self.groups)
                for g in range(self.groups)
            ]
            blocks += moved(part.blocks, dim, pieces)
        return _tensor(name, with_value(parts[0].shape, dim, sum(sizes)), blocks, parts[0])


@dataclass(frozen=True)
class Unstack(RuleStep):
    """Takes a tensor apart along a dim, such as stacked experts.

    Args:
        parts: template of the names of the parts: the wildcards of ``names``, and one more ``#``,
            which is the index along the dim.
        dim: the dim, which the parts do not have.
    """

    parts: str
    dim: int = 0

    kind: ClassVar[str] = "unstack"
    keys: ClassVar[tuple[str, ...]] = ("parts", "dim")

    def __post_init__(self) -> None:
        Template(self.parts).without_number(Template(self.names))

    def _made(self, tensor: StoredTensor, found: tuple[str, ...]) -> list[StoredTensor]:
        dim, part = self._dim(tensor, self.dim), Template(self.parts)
        at = part.without_number(Template(self.names))
        shape = tensor.shape[:dim] + tensor.shape[dim + 1 :]
        made = []
        for i in range(tensor.shape[dim]):
            name = part.filled((*found[:at], str(i), *found[at:]))
            pieces = moved(tensor.blocks, dim, [(i, i + 1, 0)])
            made.append(_tensor(name, shape, [without_dim(b, dim) for b in pieces], tensor))
        return made


@dataclass(frozen=True)
class Stack(RuleStep):
    """Stacks tensors along a new dim; undoes ``Unstack``.

    Args:
        parts: template of the names of the parts: the wildcards of ``names``, and one more ``#``.
            The numbers are 0, 1, and so on.
        dim: the dim of the result that the parts do not have.
    """

    parts: str
    dim: int = 0

    kind: ClassVar[str] = "stack"
    keys: ClassVar[tuple[str, ...]] = ("parts", "dim")

    def __post_init__(self) -> None:
        Template(self.parts).without_number(Template(self.names))

    def _found(self, tensors: Tensors) -> dict[str, tuple[str, ...]]:
        part = Template(self.parts)
        return {n: found for n in tensors if (found := part.match(n)) is not None}

    def _moves(self, tensors: Tensors) -> Iterator[tuple[list[str], list[StoredTensor]]]:
        at = Template(self.parts).without_number(Template(self.names))
        groups: dict[tuple[str, ...], dict[int, str]] = {}
        for name, found in self._found(tensors).items():
            numbered = groups.setdefault((*found[:at], *found[at + 1 :]), {})
            digits = found[at].lstrip("0")
            # Python converts only numbers of some thousand digits; no tensor has so many parts.
            number = int(digits[:_MAX_DIGITS] or 0)
            if (before := numbered.setdefault(number, name)) != name:
                raise LayoutError(f"{self}: {before!r} and {name!r} have the same number.")
        for found, numbered in groups.items():
            order = sorted(numbered)
            if order != list(range(len(order))):
                lost = next(i for i, number in enumerate(order) if i != number)
                raise LayoutError(
                    f"{self}: {quoted(numbered[order[-1]])} is there, and number {lost} is not."
                )
            names = [numbered[i] for i in order]
            parts = _all(self, tensors, names)
            yield names, [self._stacked(parts, Template(self.names).filled(found))]

    def _stacked(self, parts: list[StoredTensor], name: str) -> StoredTensor:
        dim, shape = self.dim, parts[0].shape
        if not 0 <= dim <= len(shape):
            raise LayoutError(f"{self}: {parts[0].name!r} {list(shape)} gets no dim {dim}.")
        _check_alike(self, parts, [part.shape for part in parts])
        blocks = [with_dim(b, dim, i) for i, part in enumerate(parts) for b in part.blocks]
        return _tensor(name, (*shape[:dim], len(parts), *shape[dim:]), blocks, parts[0])


@dataclass(frozen=True)
class Transpose(RuleStep):
    """Permutes the dims of tensors: dim k of the result is dim ``dims[k]``."""

    dims: tuple[int, ...]

    kind: ClassVar[str] = "transpose"
    keys: ClassVar[tuple[str, ...]] = ("dims",)

    def __post_init__(self) -> None:
        if sorted(self.dims) != list(range(len(self.dims))):
            raise LayoutError(f"{self}: dims are a permutation such as [1, 0].")

    def _made(self, tensor: StoredTensor, found: tuple[str, ...]) -> list[StoredTensor]:
        if len(tensor.shape) != len(self.dims):
            raise LayoutError(
                f"{self}: {tensor.name!r} {list(tensor.shape)} has {len(tensor.shape)} dims."
            )
        blocks = [permuted(block, self.dims) for block in tensor.blocks]
        shape = tuple(tensor.shape[d] for d in self.dims)
        return [_tensor(tensor.name, shape, blocks, tensor)]


@dataclass(frozen=True)
class Crop(RuleStep):
    """Keeps the first ``size`` indices of a dim, such as the words of a padded vocabulary."""

    size: int
    dim: int = 0

    kind: ClassVar[str] = "crop"
    keys: ClassVar[tuple[str, ...]] = ("size", "dim")

    def _made(self, tensor: StoredTensor, found: tuple[str, ...]) -> list[StoredTensor]:
        dim = self._dim(tensor, self.dim)
        if not 0 <= self.size <= tensor.shape[dim]:
            raise LayoutError(
                f"{self}: dim {dim} of {tensor.name!r} {list(tensor.shape)} has fewer elements."
            )
        blocks = moved(tensor.blocks, dim, [(0, self.size, 0)])
        return [_tensor(tensor.name, with_value(tensor.shape, dim, self.size), blocks, tensor)]


@dataclass(frozen=True)
class Pad(RuleStep):
    """Adds zeros at the end of a dim, up to ``size`` or to the next multiple of ``multiple``."""

    size: int = 0
    multiple: int = 0
    dim: int = 0

    kind: ClassVar[str] = "pad"
    keys: ClassVar[tuple[str, ...]] = ("size", "multiple", "dim")

    def __post_init__(self) -> None:
        if (self.size > 0) == (self.multiple > 0) or min(self.size, self.multiple) < 0:
            raise LayoutError(f"{self}: give either a size or a multiple.")

    def _made(self, tensor: StoredTensor, found: tuple[str, ...]) -> list[StoredTensor]:
        dim = self._dim(tensor, self.dim)
        before = tensor.shape[dim]
        size = self.size or -(-before // self.multiple) * self.multiple
        if size < before:
            raise LayoutError(
                f"{self}: dim {dim} of {tensor.name!r} {list(tensor.shape)} has more elements; "
                "[crop] makes a tensor smaller."
            )
        shape = with_value(tensor.shape, dim, size)
        zeros = Box(with_value((0,) * len(shape), dim, before), shape)
        added = (
            [] if zeros.is_empty else [StoredBlock(zeros, None, p) for p in range(tensor.num_parts)]
        )
        return [_tensor(tensor.name, shape, [*tensor.blocks, *added], tensor)]


KINDS: dict[str, type[RuleStep]] = {
    step.kind: step for step in (Split, Unstack, Transpose, Crop, Pad, Concat, Stack)
}
"""The kinds of steps, by the names of their tables, in the order in which steps are applied."""


# --- checks --------------------------------------------------------------------------------------


def _tensor(
    name: str, shape: tuple[int, ...], blocks: Iterable[StoredBlock], like: StoredTensor
) -> StoredTensor:
    return StoredTensor(name, like.dtype, shape, tuple(blocks), like.num_parts)


def _all(step: RuleStep, tensors: Tensors, names: list[str]) -> list[StoredTensor]:
    if missing := [name for name in names if name not in tensors]:
        raise LayoutError(f"{step} needs {quoted(missing)[1:-1]} beside {names[0]!r}.")
    return [tensors[name] for name in names]


def _check_alike(step: RuleStep, parts: list[StoredTensor], shapes: list[tuple[int, ...]]) -> None:
    kinds = [(p.dtype, p.num_parts, shape) for p, shape in zip(parts, shapes, strict=True)]
    if odd := [part for part, kind in zip(parts, kinds, strict=True) if kind != kinds[0]]:
        raise LayoutError(
            f"{step}: {parts[0].name!r} is {parts[0].dtype} {list(parts[0].shape)}, and "
            f"{odd[0].name!r} is {odd[0].dtype} {list(odd[0].shape)}."
        )


def _check_parts(step: RuleStep, parts: tuple[str, ...], at_least: int) -> None:
    if len(parts) < at_least or len(set(parts)) != len(parts):
        raise LayoutError(f"{step}: give {at_least} or more different parts.")
    for part in parts:
        Template(part).check_like(Template(step.names))


def step_of(kind: str, names: str, values: Any) -> RuleStep:
    """The step of one line of a table, from the values of TOML or JSON.

    Raises:
        LayoutError: they are no step of this kind.
    """
    made = KINDS[kind]
    if isinstance(values, list):
        values = {made.keys[0]: values}
    if not isinstance(values, dict) or not set(values) <= set(made.keys):
        raise LayoutError(
            f"[{kind}] {names!r} is {quoted(values)}; expected {', '.join(made.keys)}"
        )
    given: dict[str, Any] = {}
    for key, value in values.items():
        expected = made.__dataclass_fields__[key].type
        items = value if isinstance(value, list) else [value]
        item_type = str if "str" in str(expected) else int
        if ("tuple" in str(expected)) != isinstance(value, list) or not all(
            type(item) is item_type for item in items
        ):
            raise LayoutError(f"[{kind}] {names!r}: {key} is {quoted(value)}")
        given[key] = tuple(value) if isinstance(value, list) else value
    try:
        return made(names, **given)
    except TypeError:
        raise LayoutError(f"[{kind}] {names!r} lacks one of {', '.join(made.keys)}") from None
