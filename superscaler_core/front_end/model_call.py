"""ModelCall: the arguments with which a model is captured, and which of its outputs are kept.

The loss is alone, first in a tuple, or has the name ``loss`` in a mapping or an object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.autocast import Autocast, active
from superscaler_core.front_end.containers import check_arguments, closed, opened

_OFF = {"use_cache": False}
"""Arguments of a forward that request values for generation alone, with the values that decline."""


@dataclass(frozen=True)
class ModelCall:
    """One call of a model.

    Attributes:
        args, kwargs: arguments of its forward, by position and by name.
        num_results: number of results that are recycled; if there are any, the model returns a
            tuple of the loss and these results.
        results: further values to keep: keys or fields of the output, or positions in a tuple.
        autocasts: the autocasts that are on where the model is called.
        given: the arguments as they were given, where ``args`` and ``kwargs`` have plain containers
            in place of dataclasses and mappings (``containers``).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_results: int = 0
    results: tuple[str | int, ...] = ()
    autocasts: tuple[Autocast, ...] = ()
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: Sequence[Any] | Mapping[str, Any],
        kwargs: Mapping[str, Any] | None = None,
        **kept: Any,
    ) -> ModelCall:
        """The call with these arguments; those by name are sorted in the order of the forward.

        Args:
            model: the model.
            args, kwargs: the arguments by position and by name; ``args`` may be a mapping too.
            kept: the other attributes.

        Raises:
            CaptureError: the forward does not take the arguments, or tracing cannot.
        """
        named = {**(args if isinstance(args, Mapping) else {}), **(kwargs or {})}
        placed = () if isinstance(args, Mapping) else tuple(args)
        signature = inspect.signature(model.forward)
        order = list(signature.parameters)
        off = {name: value for name, value in _OFF.items() if name in order}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        if takes_any and hasattr(getattr(model, "config", None), "use_cache"):
            off = _OFF
        given = {**off, **named}
        try:
            signature.bind(*placed, **given)
        except TypeError as error:
            names = ", ".join([*(f"argument {i}" for i in range(len(placed))), *named])
            raise CaptureError(
                f"{type(model).__name__}.forward does not take {names}: {error}."
            ) from None
        given = dict(sorted(given.items(), key=lambda item: _place(order, item[0])))
        own: tuple[Any, ...] = opened(placed)
        keywords: dict[str, Any] = opened(given)
        check_arguments({**{f"{i}": value for i, value in enumerate(own)}, **keywords})
        return cls(own, keywords, autocasts=active(), given=(placed, given), **kept)

    def copied(self, model: nn.Module) -> ModelCall:
        """The same call with copies of its tensors, on the device of the model."""
        device = next((p.device for p in model.parameters()), None)
        # Without copies, tracing would make one input of a tensor that is given twice.
        return self.map(lambda tensor: tensor.detach().to(device, copy=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelCall:
        """The same call with other tensors."""

        def changed(leaf: Any) -> Any:
            return change(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(changed, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments: the inputs of the graph, in their order."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    @cached_property
    def form(self) -> Hashable:
        """A key that is equal for calls that one program can do: only values of tensors differ.

        Programs differ by which of them require gradients.
        """
        leaves, form = pytree.tree_flatten((self.args, self.kwargs))
        return str(form), tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        )

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position and by name, in the containers in which they were given."""
        placed, named = self.given or (self.args, self.kwargs)
        return closed(self.args, placed), closed(self.kwargs, named)

    @property
    def named(self) -> Mapping[str, Tensor]:
        """The same tensors by the paths of the arguments, for messages."""
        placed = {f"argument {i}": value for i, value in enumerate(self.args)}
        return {
            f"{name}{pytree.keystr(path)}": leaf
            for name, value in {**placed, **self.kwargs}.items()
            for path, leaf in pytree.tree_flatten_with_path(value)[0]
            if isinstance(leaf, Tensor)
        }

    @contextmanager
    def returning_loss(self, model: nn.Module) -> Iterator[None]:
        """Inside this context, the model returns the tuple of its loss and the kept results.

        It gets its arguments in the containers in which they were given.
        """

        def as_given(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return replace(self, args=args, kwargs=kwargs).arguments

        def only(module: nn.Module, args: Any, output: Any) -> tuple[Any, ...]:
            return self._kept(model, output)

        before = model.register_forward_pre_hook(as_given, prepend=True, with_kwargs=True)
        after = model.register_forward_hook(only)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _kept(self, model: nn.Module, output: Any) -> tuple[Any, ...]:
        if self.num_results:
            first = tuple(output) if isinstance(output, tuple | list) else (output,)
        else:
            first = (loss_of(model, output),)
        return (*first, *(_result(model, output, which) for which in self.results))


def _result(model: nn.Module, output: Any, which: str | int) -> Tensor:
    """A result beside the loss."""
    is_key = isinstance(which, int) or isinstance(output, Mapping)
    try:
        found = output[which] if is_key else getattr(output, str(which))
    except (AttributeError, IndexError, KeyError, TypeError):
        found = None
    if isinstance(found, Tensor):
        return found
    names = [*output] if isinstance(output, Mapping) else [*getattr(output, "__dict__", ())]
    if isinstance(output, tuple | list):
        names = [*getattr(output, "_fields", ()), *map(str, range(len(output)))]
    has = f"it has {', '.join(map(str, names))}" if names else "it has no names"
    raise CaptureError(
        f"{type(model).__name__} returns {type(output).__name__}, which has no tensor {which!r} to "
        f"keep as a result; {has}."
    )


def loss_of(model: nn.Module, output: Any) -> Tensor:
    """The loss in the output of a model.

    Raises:
        CaptureError: the output has no loss.
    """
    loss = next(found(output) for form, found in _FORMS.items() if isinstance(output, form))
    if isinstance(loss, Tensor):
        return loss
    raise CaptureError(
        f"{type(model).__name__} returns {type(output).__name__} without a loss; it has to return "
        "a scalar loss, alone, first in a tuple, or by the name 'loss'. Many models compute it "
        "only if they are given labels."
    )


_FORMS: Mapping[type[Any], Callable[[Any], Any]] = {
    Tensor: lambda output: output,
    Mapping: lambda output: output.get("loss"),
    tuple: lambda output: getattr(output, "loss", output[0] if output else None),
    list: lambda output: output[0] if output else None,
    object: lambda output: getattr(output, "loss", None),
}
"""The loss in each form of output; the first that fits is taken."""


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)
