"""Modules as ops: a module that tracing cannot follow, or that is registered, is one op.

Its forward is a torch op that names the call; running it on placeholder values tells the shapes of
its results, and the bytes that autograd keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.probe import NotOneOpError, Probed, outside_of_tracing, probe
from superscaler_core.graph.annotation import Annotation
from superscaler_core.ops.modules import ModuleCall, Slot, enter, skeleton_of, state_of
from superscaler_core.quoted import quoted
from superscaler_core.rules.calls import TracedCall, called_as_op, is_literal

REGISTERED_MODULES: dict[str, str] = {}
"""Annotations of modules that are one op, by the path of their class, which may contain ``*``."""

KNOWN_MODULES = {"transformers.models.*Experts": "t h^, t k^, t k^ -> t h^"}
"""Annotations of modules of libraries, in the same form. The experts of transformers take tokens,
the experts of each token, and the weights of these experts.

A class that fits the path but takes another number of tensors is traced as any other class.
"""

_TABLES = REGISTERED_MODULES, KNOWN_MODULES


def register_module(module: type[nn.Module] | str, annotation: str) -> None:
    """Make the modules of a class one op each, which plans split as the annotation says.

    The annotation is that of the tensors which the forward takes and returns; its parameters and
    buffers follow as whole operands. As for ``register_op``, the forward has to be correct on
    parts, that is on any piece of a loop that is not fixed (``^``). So a module whose rows are
    independent has the annotation ``"b s^ h^ -> b s^ h^"``.

    Args:
        module: the class, or its import path, in which ``*`` stands for anything.
        annotation: see ``Annotation``.

    Raises:
        AnnotationError: the annotation cannot be read.

    >>> register_module(torch.nn.Bilinear, "b s^, b t^ -> b h^")
    """
    Annotation.parse(annotation)
    path = module if isinstance(module, str) else path_of(module)
    REGISTERED_MODULES[path] = annotation


def path_of(kind: type[nn.Module]) -> str:
    """The import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _annotation_of(module: nn.Module, tables: Sequence[dict[str, str]] = _TABLES) -> str:
    """The annotation of a module; empty if it has none."""
    path = path_of(type(module))
    # The last registration that matches is used.
    return next((t[p] for t in tables for p in reversed(t) if fnmatchcase(path, p)), "")


class UntraceableError(CaptureError):
    """Tracing cannot follow the module at ``path``, or running it failed as it was one op already.

    The path is empty for the model itself.
    """

    def __init__(self, path: str, why: str = "", *, is_op: bool = False) -> None:
        super().__init__(why)
        self.path, self.is_op = path, is_op


class ModulesAsOps:
    """The modules of a model that are one op; registered ones are so from the beginning.

    ``_why`` has the reason why tracing cannot follow each module; None for a registered module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._why: dict[str, UntraceableError | None] = {}
        for path, module in model.named_modules():
            if path and not self._is_inside(path) and _annotation_of(module):
                self._why[path] = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While a model is traced in this context, each call of these modules is one torch op."""
        with ExitStack() as stack:
            for path, why in self._why.items():
                module = self._model.get_submodule(path)
                forward = _Forward(path, module, "" if why else _annotation_of(module))
                stack.enter_context(patch.object(module, "forward", forward))
            yield

    def add(self, error: UntraceableError) -> None:
        """Make the module where tracing failed one op; if it cannot be, the module around it.

        Raises:
            CaptureError: this is the model itself, or a module that is one op failed as it ran.
        """
        path, why = error.path, error
        if known := self._why.get(path):
            if not error.is_op:
                raise known from None
            why = UntraceableError(path, f"{known} {error}")
            why.node = known.node
            path = self._around(path)
        if not path:
            raise why from None
        kind = type(self._model.get_submodule(path))
        # If a second module of a class fails, all modules of the class become ops.
        has_failed = any(type(self._model.get_submodule(p)) is kind for p in self._why)
        paths = [p for p, m in self._model.named_modules() if type(m) is kind] if has_failed else []
        for new in [path, *paths]:
            if new == path or not self._is_inside(new):
                self._why = {p: w for p, w in self._why.items() if not p.startswith(f"{new}.")}
                self._why[new] = why

    def _is_inside(self, path: str) -> bool:
        return any(path == other or path.startswith(f"{other}.") for other in self._why)

    def _around(self, path: str) -> str:
        """The nearest module around a module that has a forward; lists of modules have none."""
        while path:
            path = path.rpartition(".")[0]
            if type(self._model.get_submodule(path)).forward is not nn.Module.forward:
                return path
        return path


class _Forward:
    """The replacement for the forward of a module while the model is traced."""

    def __init__(self, path: str, module: nn.Module, annotation: str) -> None:
        self._path, self._module, self._forward = path, module, module.forward
        self._annotation, self._skeleton = annotation, skeleton_of(module)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, keywords))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        annotation = self._annotation
        if annotation and len(Annotation.parse(annotation).inputs) != len(given):
            if not _annotation_of(self._module, [REGISTERED_MODULES]):
                return self._forward(*args, **keywords)
            raise CaptureError(
                f"{type(self._module).__name__} takes {len(given)} tensors, and is registered as "
                f'"{annotation}"; give an operand for each.'
            )
        own = state_of(self._module)
        numbers = count()
        slots = [Slot(next(numbers)) if isinstance(x, Tensor) else x for x in leaves]
        placed, named = pytree.tree_unflatten(slots, form)
        tensors = [*given, *own.values()]
        try:
            if bad := [x for x in leaves if not isinstance(x, Tensor) and not is_literal(x)]:
                raise NotOneOpError(f"it takes a {type(bad[0]).__name__}")
            made = probe(ModuleCall(self._skeleton, (placed, named), tuple(own), ()), tensors)
        except NotOneOpError as error:
            error.path = self._path
            raise
        operands = [tuple(x.shape) for x in tensors]
        with outside_of_tracing():
            key = enter(made.call)
        what = OneModule(made, operands, annotation, [key])
        results = iter(called_as_op(what, tensors))
        return pytree.tree_map_only(Tensor, lambda x: next(results), made.returned)


@dataclass(frozen=True)
class OneModule(TracedCall):
    """A call of a module in a traced program.

    Attributes:
        operands: shapes of its tensors.
        rows: the annotation of its arguments and results, if the module is registered.
    """

    known: Probed
    operands: Sequence[tuple[int, ...]]
    rows: str
    modules: Sequence[str]

    @property
    def call(self) -> ModuleCall:
        """The call."""
        return self.known.call

    @property
    def name(self) -> str:
        return type(self.call.skeleton).__name__

    @property
    def flops(self) -> float:
        return self.known.flops

    @property
    def annotation(self) -> str:
        if not self.rows:
            return ""
        left, right = self.rows.split("->")
        weights = self.operands[len(self.operands) - len(self.call.names) :]
        words = (" ".join(f"w{i}_{n}^" for i, n in enumerate(shape)) or "()" for shape in weights)
        return f"{', '.join([left, *words])} -> {right}"

    def hint(self, rows: str) -> str:
        left, right = rows.split(" -> ") if rows else ("...", "...")
        # The operands of weights are not written in a registration.
        left = ", ".join(left.split(", ")[: len(self.operands) - len(self.call.names)])
        rows = f"{left} -> {right}"
        return (
            f'superscaler_core.register_module({self.name}, "{rows}") makes it splittable, if its '
            "rows are independent."
        )

    def code(self, words: Sequence[str]) -> str:
        shapes = "".join(f"{{out{i}.shape}}, " for i in range(len(self.known.results)))
        key = quoted(self.modules[0])
        return f"ops.call_module({key}, ({', '.join(words)},), ({shapes.rstrip()}))"

    def shapes_only(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in self.known.results]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.call(tensors, [shape for shape, _ in self.known.results])
