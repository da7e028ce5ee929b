"""Register: makes a Python function that cannot be traced into one op with an annotation."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, TypeVar

import torch
from torch import Tensor

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.ops.without_data import without_data

NAMESPACE = "superscaler"
"""Namespace of the torch ops that represent registered functions in a traced program."""

_SCHEMA_TYPES = {"int": "int", "float": "float", "bool": "bool", "str": "str"}

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

NOT_IMPORTED = (
    "generated code cannot import {}; define it at the top of a module that is not the script "
    "itself."
)


def imported(what: Any) -> Any:
    """What another process imports by the path of a function or class; None if that is nothing."""
    if what.__module__ == "__main__":
        return None
    found: Any = importlib.import_module(what.__module__)
    for name in what.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


@dataclass(frozen=True)
class Registered:
    """A registered function.

    Attributes:
        function: takes the tensors by position, then attributes by keyword.
        annotation: how the dims of its tensors relate.
        sizes: sizes of loops that the inputs do not determine: a number, or the name of an
            attribute.
        dtypes: dtypes of the outputs; None is the dtype of the first floating-point input.
        saves, flops, launches: as in ``register_op``.
        attributes: names of the keyword arguments.
    """

    function: Callable[..., Any]
    annotation: Annotation
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    dtypes: tuple[str | None, ...] = ()
    saves: tuple[int, ...] | None = None
    flops: float | None = None
    launches: tuple[int, int] | None = None
    attributes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The path by which generated code imports it: ``package.module.function``."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def is_importable(self) -> bool:
        """Whether another process can import it by its path."""
        is_nested = "." in self.function.__qualname__
        found = None if is_nested else imported(self.function)
        return getattr(found, "__wrapped__", None) is self.function

    def sizes_of(self, attributes: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of loops that the shapes of inputs do not determine."""
        return {i: attributes[s] if isinstance(s, str) else s for i, s in self.sizes.items()}

    def outputs(
        self, inputs: Sequence[tuple[tuple[int, ...], str]], attributes: Mapping[str, Any]
    ) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output.

        Raises:
            AnnotationError: the inputs do not fit the annotation.
        """
        # The annotation without outputs, because their shapes are the unknowns.
        inner = Annotation(self.annotation.inputs, (), self.annotation.fixed)
        sizes = inner.sizes([shape for shape, _ in inputs], (), self.sizes_of(attributes))
        default = next((d for _, d in inputs if d.startswith(("float", "bfloat"))), inputs[0][1])
        boxes = (self.annotation.box(out, {}, sizes) for out in self.annotation.outputs)
        pairs = zip(boxes, self.dtypes, strict=True)
        return [(box.shape, dtype or default) for box, dtype in pairs]

    def forms(
        self, tensors: Sequence[Tensor], attributes: Mapping[str, Any]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """As ``outputs``, for input tensors, with torch's dtypes."""
        default = {p.name: p.default for p in inspect.signature(self.function).parameters.values()}
        inputs = [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
        made = self.outputs(inputs, {**default, **attributes})
        return [(shape, getattr(torch, dtype)) for shape, dtype in made]


REGISTERED: dict[str, Registered] = {}
"""Registered functions, by the name of their torch op: ``superscaler.name``."""


def register_op(
    annotation: str,
    *,
    sizes: Mapping[str, int | str] | None = None,
    dtypes: Sequence[str | None] | None = None,
    saves: Sequence[int] | None = None,
    flops: float | None = None,
    launches: tuple[int, int] | None = None,
) -> Callable[[AnyFunction], AnyFunction]:
    """Make a function one op of captured graphs; outside of capture it is the same function.

    The function takes its tensors by position and everything else by keyword, annotated as
    ``int``, ``float``, ``bool`` or ``str``. It must be correct on parts: any piece of a loop
    without mark gives a piece of the output, and any piece of a loop marked ``+`` gives a partial
    sum of the output. It must be defined at the top of a module that every process can import.

    The function may do what tracing cannot follow: look at values, or loop over them. Only the
    shapes of its results must not depend on values: give ``sizes`` an upper bound, and fill the
    results up to this size.

    Args:
        annotation: annotation of its tensors; see ``Annotation``.
        sizes: sizes of loops that the inputs do not determine: a number, or the name of a keyword
            argument. Loops that only outputs have must be fixed, because a part would not know
            which piece it is.
        dtypes: dtypes of the outputs, such as ``"int64"``; None is the dtype of the first
            floating-point input.
        saves: as in ``graph.Op``.
        flops: as in ``graph.Op``; if None, those of its products, which torch counts if the
            function runs without values, but at least one for each element of its largest tensor.
        launches: the kernels that its forward and its backward launch on a device, if it is
            a fused kernel there; if None, they are counted.

    Raises:
        AnnotationError: the annotation does not fit the function.

    Example::

        @register_op("b s^ e^ -> b s^ k^", sizes={"k": "count"}, dtypes=["int64"])
        def best(scores: Tensor, *, count: int) -> Tensor:
            return scores.topk(count).indices
    """
    made = Annotation.parse(annotation)
    _check_launches(launches)
    given = dict(sizes or {})
    types = tuple(dtypes) if dtypes is not None else (None,) * len(made.outputs)
    _check_sizes(made, given, types)

    def enter(function: AnyFunction) -> AnyFunction:
        attributes = _attributes(function, len(made.inputs))
        known = Registered(
            function, made, given, types, None if saves is None else tuple(saves), flops,
            launches, tuple(attributes),
        )  # fmt: skip
        traced = _torch_op(known, attributes)

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if torch.compiler.is_exporting():
                return traced(*args, **keywords)
            if not any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
                return function(*args, **keywords)
            try:
                return function(*args, **keywords)
            except RuntimeError:
                # The function looks at values, but memory is measured without values.
                made = without_data(args, known.forms(args, keywords))
                return made[0] if len(made) == 1 else made

        return call  # type: ignore[return-value]

    return enter


def _check_sizes(
    annotation: Annotation, sizes: Mapping[str, object], dtypes: Sequence[object]
) -> None:
    dims = [dim for operand in annotation.inputs for dim in operand]
    held = {i for dim in dims if not isinstance(dim, SlidingWindow) for i in dim}
    if any(isinstance(dim, SlidingWindow) for dim in dims):
        raise AnnotationError(
            f"{annotation}: a registered function is not told where its windows reach over an end "
            "of the tensor; mark what they slide along '^'."
        )
    for identifier in annotation.ids:
        if identifier in held:
            continue
        if identifier not in sizes:
            raise AnnotationError(
                f"{annotation}: no input says how large {identifier} is; give "
                f'sizes={{"{identifier}": ...}}, a number or the name of a keyword argument.'
            )
        if identifier not in annotation.fixed:
            raise AnnotationError(
                f"{annotation}: only outputs have {identifier}, so a part would not know which "
                f"piece of it to make; write '{identifier}^'."
            )
    if len(dtypes) != len(annotation.outputs):
        raise AnnotationError(
            f"{annotation} has {len(annotation.outputs)} outputs, but {len(dtypes)} dtypes are "
            "given."
        )


def _check_launches(launches: Any) -> None:
    if launches is None:
        return
    is_pair = isinstance(launches, tuple) and len(launches) == 2
    if not is_pair or not all(type(num) is int and num >= 0 for num in launches):
        raise AnnotationError(
            f"launches={launches!r}: give a tuple of two numbers, the kernels of the forward and "
            "those of the backward, each at least 0."
        )


def _attributes(function: Callable[..., Any], num_inputs: int) -> dict[str, str]:
    """The keyword arguments as a torch schema writes them."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < num_inputs or any(
        p.kind is not p.KEYWORD_ONLY for p in parameters[num_inputs:]
    ):
        raise AnnotationError(
            f"{function.__qualname__} has to take {num_inputs} tensors, as its annotation says, "
            "and everything else by keyword only (after '*')."
        )
    made = {}
    for parameter in parameters[num_inputs:]:
        name = getattr(parameter.annotation, "__name__", parameter.annotation)
        if name not in _SCHEMA_TYPES:
            raise AnnotationError(
                f"{function.__qualname__}: argument {parameter.name!r} needs an annotation out of "
                f"{', '.join(_SCHEMA_TYPES)}."
            )
        made[parameter.name] = f"{_SCHEMA_TYPES[name]} {parameter.name}"
        if parameter.default is not parameter.empty:
            value = parameter.default
            made[parameter.name] += f'="{value}"' if isinstance(value, str) else f"={value}"
    return made


def _torch_op(known: Registered, attributes: Mapping[str, str]) -> Callable[..., Any]:
    """The torch op that represents the function while a model is traced."""
    base = re.sub(r"\W", "_", known.path)
    # A module that is loaded again registers its functions again, so names get a number.
    candidates = chain([base], (f"{base}_{number}" for number in count(2)))
    name = next(n for n in candidates if f"{NAMESPACE}.{n}" not in REGISTERED)
    tensors = [f"Tensor x{i}" for i in range(len(known.annotation.inputs))]
    words = [*tensors, *(["*", *attributes.values()] if attributes else [])]
    returns = ", ".join(["Tensor"] * len(known.annotation.outputs))
    torch.library.define(f"{NAMESPACE}::{name}", f"({', '.join(words)}) -> ({returns})")

    def shapes_only(*tensors: Tensor, **given: Any) -> Any:
        made = [tensors[0].new_empty(s, dtype=dtype) for s, dtype in known.forms(tensors, given)]
        return made[0] if len(made) == 1 else tuple(made)

    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes_only)
    torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd", known.function)
    REGISTERED[f"{NAMESPACE}.{name}"] = known
    found: Callable[..., Any] = getattr(torch.ops.superscaler, name)
    return found
