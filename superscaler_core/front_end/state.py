"""State: values besides parameters that a model keeps from one call to the next.

For a counter, a cache, or a tensor of the previous step, a program uses the value at the capture.
Many attributes are harmless: they are written before they are read, or the first call computes them
once. Capturing a second call shows whether an attribute matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.hooks import Hooks
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.tensor import CONSTANT, PTensor
from superscaler_core.rules.records import TracedProgram

_LISTS_OF_WEIGHTS = {"_flat_weights", "_flat_weight_refs"}

_OF_TORCH = frozenset({*vars(nn.Module()), "forward", *_LISTS_OF_WEIGHTS})
"""Attributes that every module has: parameters, buffers, hooks, its mode. The forward of a module
that is one op is replaced while the model is traced, and recurrent layers list their weights."""

_NUMBERS = (bool, int, float, str)

Place = tuple[str, str]
"""Path of a module, and name of an attribute."""


class State:
    """The attributes of a model's modules before a call, and what the call changes in them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._attributes()
        self._after: dict[Place, Any] = {}
        self._hooks_after = self._hooks_before = Hooks(model)
        self._own: list[int] = []  # ids of the hooks of this class
        self._registered: Mapping[str, Any] = {}

    @property
    def changed(self) -> frozenset[str]:
        """Paths of attributes that the call changed."""
        return frozenset(f"{path}.{name}".lstrip(".") for path, name in self._after)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record what the call inside this context changes.

        Raises:
            CaptureError: the call replaces a buffer or parameter by another tensor.
        """
        # Tracing undoes the changes of a call, so they are recorded as soon as the call ends.
        hooks = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(self._look),
        ]
        self._own = [hook.id for hook in hooks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._set(self._before)

    def check(self, program: TracedProgram, graph: Graph, again: Callable[[], Graph]) -> None:
        """Refuse a model whose next call, which ``again`` captures, is another program.

        Raises:
            CaptureError: the next call is another program.
        """
        is_read = any(name in self.changed for name, _ in program.constants.values())
        self._set(self._after)
        self._hooks_after.put()
        try:
            is_same = not is_read and self._is_same(graph, again())
        except CaptureError:
            is_same = False
        finally:
            self._set(self._before)
            self._hooks_before.put()
        if not is_same:
            raise CaptureError(
                f"{type(self._model).__name__} keeps something from one call to the next in "
                f"{', '.join(sorted(self.changed))}, which a program does not; make it an input, "
                "keep it out of the loss, or make a tensor of it a buffer that is written in place."
            )

    def _is_same(self, graph: Graph, again: Graph) -> bool:
        one, two = ([(op.code, op.annotation, op.outputs) for op in g.ops] for g in (graph, again))
        reads = [[tensor for op in g.ops for tensor in op.inputs] for g in (graph, again)]
        return one == two and all(
            self._is_same_input(graph, a, again, b) for a, b in zip(*reads, strict=True)
        )

    def _is_same_input(self, graph: Graph, one: PTensor, again: Graph, two: PTensor) -> bool:
        if CONSTANT not in (one.kind, two.kind):
            return one == two
        if (one.kind, one.shape, one.dtype) != (two.kind, two.shape, two.dtype):
            return False
        # The next call reads a value left by this call, which was computed only from constants.
        is_left = two.name in self.changed
        return is_left or torch.equal(graph.constants[one.name], again.constants[two.name])

    # --- recording ------------------------------------------------------------------------------

    def _begin(self, *_: Any) -> None:
        self._registered = self._tensors()

    def _look(self, *_: Any) -> None:
        for name, tensor in self._tensors().items():
            if tensor is not self._registered.get(name):
                raise CaptureError(
                    f"the forward puts another tensor in the place of {name!r}, which parts of a "
                    "split batch would do differently; keep it out of the model."
                )
        self._hooks_after = Hooks(self._model, without=self._own)
        now, before = self._attributes(), self._before
        self._after = {at: now[at] for at in now if not _is_equal(before.get(at), now[at])}

    def _tensors(self) -> Mapping[str, Any]:
        named = self._model.named_buffers, self._model.named_parameters
        return {name: t for each in named for name, t in each(remove_duplicate=False)}

    def _attributes(self) -> dict[Place, Any]:
        # Lists and dicts are copied, because a call may change them in place.
        return {
            (path, name): pytree.tree_map(lambda leaf: leaf, value)
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        }

    def _set(self, values: Mapping[Place, Any]) -> None:
        """Set changed attributes to these values; tensors of the tracing become zeros."""
        for path, name in self._after:
            attributes = vars(self._model.get_submodule(path))
            attributes.pop(name, None)
            if (path, name) in values:
                attributes[name] = pytree.tree_map_only(
                    FakeTensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), values[path, name]
                )


def _is_equal(one: Any, other: Any) -> bool:
    leaves, form = pytree.tree_flatten(one)
    others, other_form = pytree.tree_flatten(other)
    return form == other_form and all(
        a is b or (isinstance(a, _NUMBERS) and a == b) for a, b in zip(leaves, others, strict=True)
    )
