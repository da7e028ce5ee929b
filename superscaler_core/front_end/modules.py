"""Modules as ops: a module that tracing cannot follow, or that is registered, is one op.

Its forward is a torch op that names the call; running it on placeholder values tells the shapes of
its results, and the bytes that autograd keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from superscaler_core.front_end import experts
from superscaler_core.front_end.listed_experts import is_around_experts, rows_of_listed
from superscaler_core.front_end.probe import NotOneOpError, Probed, outside_of_tracing, probe
from superscaler_core.graph.annotation import Annotation
from superscaler_core.ops.experts import stacked_names
from superscaler_core.ops.modules import ModuleCall, Slot, enter, skeleton_of, state_of, tensors_of
from superscaler_core.quoted import quoted
from superscaler_core.rules.calls import TracedCall, called_as_op, is_literal

REGISTERED_MODULES: dict[str, str] = {}
"""Annotations of modules that are one op, by the path of their class, which may contain ``*``."""

KNOWN_MODULES = {"transformers.models.*Experts": experts.ROWS}
"""Annotations of modules of libraries, in the same form.

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
            is_known = (
                _annotation_of(module)
                or experts.may_be_experts(module)
                or is_around_experts(module)
            )
            if path and not self._is_inside(path) and is_known:
                self._why[path] = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While a model is traced in this context, each call of these modules is one torch op."""
        with ExitStack() as stack:
            for path, why in self._why.items():
                module = self._model.get_submodule(path)
                forward = _Forward(path, module, why)
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
    """The replacement for the forward of a module while the model is traced.

    A module that may be experts is traced if it turns out to be none.
    """

    def __init__(self, path: str, module: nn.Module, why: UntraceableError | None) -> None:
        self._path, self._module, self._forward = path, module, module.forward
        self._annotation = "" if why else _annotation_of(module)
        self._is_op, self._skeleton = bool(why or self._annotation), skeleton_of(module)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, keywords))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        annotation, own = self._annotation, state_of(self._module)
        is_registered = bool(_annotation_of(self._module, [REGISTERED_MODULES]))
        if annotation and len(Annotation.parse(annotation).inputs) != len(given):
            if not is_registered:
                return self._forward(*args, **keywords)
            raise CaptureError(
                f"{type(self._module).__name__} takes {len(given)} tensors, and is registered as "
                f'"{annotation}"; give an operand for each.'
            )
        numbers = count()
        slots = [Slot(next(numbers)) if isinstance(x, Tensor) else x for x in leaves]
        placed, named = pytree.tree_unflatten(slots, form)
        tensors = [*given, *own.values()]
        listed = stacked_names(self._module) if is_around_experts(self._module) else frozenset()
        found = listed or experts.numbered(self._module, given)
        if not self._is_op and not found:
            return self._forward(*args, **keywords)
        try:
            if bad := [x for x in leaves if not isinstance(x, Tensor) and not is_literal(x)]:
                raise NotOneOpError(f"it takes a {type(bad[0]).__name__}")
            made = probe(ModuleCall(self._skeleton, (placed, named), tuple(own), ()), tensors)
        except (NotOneOpError, CaptureError) as error:
            if not self._is_op:
                return self._forward(*args, **keywords)
            if isinstance(error, NotOneOpError):
                error.path = self._path
            raise
        is_known = bool(_annotation_of(self._module, [KNOWN_MODULES]))
        with outside_of_tracing():
            key = enter(made.call)
            if listed:
                annotation = annotation or rows_of_listed(
                    made.call, given, tensors_of(made.returned)
                )
                found = listed if annotation else frozenset()
            elif found and not is_known and not experts.adds_up(made.call, given, found):
                found = frozenset()
        if found and not annotation:
            annotation = experts.ROWS
        if not annotation and not self._is_op:
            return self._forward(*args, **keywords)
        state = {name: tuple(x.shape) for name, x in own.items()}
        call = "call_listed" if listed else "call_experts"
        what = OneModule(made, state, len(given), annotation, found, call, [key])
        results = iter(called_as_op(what, tensors))
        return pytree.tree_map_only(Tensor, lambda x: next(results), made.returned)


@dataclass(frozen=True)
class OneModule(TracedCall):
    """A call of a module in a traced program.

    Attributes:
        state: shapes of the module's parameters and buffers, by name, which follow its arguments.
        num_args: tensors among its arguments.
        rows: the annotation of its arguments and results, if it is known.
        numbered: the parameters that number experts in their first dim, if the module is experts.
        experts_call: the function of ``ops`` that runs some of the experts.
    """

    known: Probed
    state: Mapping[str, tuple[int, ...]]
    num_args: int
    rows: str
    numbered: experts.Numbered
    experts_call: str
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
        return experts.annotated(self.rows, self.state, self.numbered) if self.rows else ""

    def hint(self, rows: str) -> str:
        left, right = rows.split(" -> ") if rows else ("...", "...")
        # The operands of weights are not written in a registration.
        left = ", ".join(left.split(", ")[: self.num_args])
        rows = f"{left} -> {right}"
        return (
            f'superscaler_core.register_module({self.name}, "{rows}") makes it splittable, if its '
            "rows are independent."
        )

    def code(self, words: Sequence[str]) -> str:
        shapes = "".join(f"{{out{i}.shape}}, " for i in range(len(self.known.results)))
        key = quoted(self.modules[0])
        given = f"{key}, ({', '.join(words)},), ({shapes.rstrip()})"
        if not self.numbered:
            return f"ops.call_module({given})"
        num = self.state[min(self.numbered)][0]
        here = f"first={{start[expert]}}, num_here={{size[expert]}}, num_experts={num}"
        return f"ops.{self.experts_call}({given}, {here})"

    def shapes_only(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in self.known.results]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.call(tensors, [shape for shape, _ in self.known.results])
