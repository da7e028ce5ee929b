"""Watched: the values of a model that a capture read, and whether they are still the same.

``Reads`` records which attributes the forward reads while it is traced. ``Watched`` remembers their
values, and tells before each step whether they still hold, as the guards of ``torch.compile`` do.
It costs some microseconds per module, because unchanged values are compared by identity.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, set)
_MAX_DEPTH = 4
"""How deep the attributes of objects and containers are followed, such as those of a config."""


class Reads:
    """Inside this context, records the attributes of a model's modules that are read.

    What is written before it is read, such as a loss that a module leaves for another, is not a
    value that the model had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        # Tracing wraps modules in proxies, which share the dict of the module.
        self._names: dict[int, dict[str, bool]] = {
            id(vars(module)): {} for module in self._modules.values()
        }

    def __enter__(self) -> Reads:
        names, read, write = self._names, object.__getattribute__, nn.Module.__setattr__

        def reading(module: Any, name: str) -> Any:
            found = names.get(id(read(module, "__dict__")))
            if found is not None:
                found.setdefault(name, True)
            return read(module, name)

        def writing(module: Any, name: str, value: Any) -> None:
            found = names.get(id(read(module, "__dict__")))
            if found is not None:
                found.setdefault(name, False)
            write(module, name, value)

        self._patches = ExitStack()
        of_module = partial(patch.object, nn.Module)
        self._patches.enter_context(of_module("__getattribute__", reading, create=True))
        self._patches.enter_context(of_module("__setattr__", writing))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def watched(self, without: Collection[str]) -> Watched:
        """The present values of what was read.

        Args:
            without: paths of attributes that may change, such as buffers that a step replaces, or
                names of attributes that are no part of the path of a module.
        """
        found = Watched()
        for path, module in self._modules.items():
            known = self._names[id(vars(module))].items()
            read = (name for name, is_first in known if is_first and not name.startswith("__"))
            paths = ((name, f"{path}.{name}".lstrip(".")) for name in read)
            found.add(path, module, [n for n, p in paths if n not in without and p not in without])
        return found


class _Same:
    """Equal to one tensor alone: a comparison of tensors compares their elements."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return other is self.tensor

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Entry:
    """Some values, and where they are looked up again."""

    names: tuple[str, ...]
    look: Callable[[Any], tuple[Any, ...]]
    owner: Any
    seen: tuple[Any, ...]

    def difference(self) -> str:
        """The first value that changed; empty if none did."""
        for name, seen in zip(self.names, self.seen, strict=True):
            try:
                now = self.look(self.owner)[self.names.index(name)]
            except (AttributeError, KeyError):
                return f"{name} is gone"
            if not _is_equal(seen, now):
                return f"{name} changed from {_text(seen)} to {_text(now)}"
        return ""


@dataclass
class Watched:
    """Values that a capture read.

    Laws (tests/superscaler_core/parallel/test_watched.py): ``holds()`` if and only if
    ``difference()`` is empty; setting a value back to an equal one makes it hold again.
    """

    _entries: list[_Entry] = field(default_factory=list)
    _contents: list[tuple[str, Any, Any]] = field(default_factory=list)
    _tensors: list[tuple[str, Tensor, int]] = field(default_factory=list)

    @cached_property
    def _seen(self) -> tuple[list[Any], list[Any], list[int]]:
        contents = [seen for _, _, seen in self._contents]
        versions = [version for _, _, version in self._tensors]
        return [entry.seen for entry in self._entries], contents, versions

    def holds(self) -> bool:
        """Whether every value is the same as at the capture."""
        try:
            # Lists are compared in one call, which is several times as fast as a loop.
            values = [entry.look(entry.owner) for entry in self._entries]
            contents = [live for _, live, _ in self._contents]
            return self._seen == (values, contents, [t._version for _, t, _ in self._tensors])
        except Exception:  # A value is gone, or has no truth, such as a comparison of tensors.
            return False

    def difference(self) -> str:
        """The first value that changed, with its path; empty if all hold."""
        for entry in self._entries:
            if found := entry.difference():
                return found
        for path, live, seen in self._contents:
            if not _is_equal(live, seen):
                return f"{path} has other contents"
        for path, tensor, version in self._tensors:
            if tensor._version != version:
                return f"{path} has other values"
        return ""

    def add(self, path: str, module: nn.Module, names: Iterable[str]) -> None:
        """Watch attributes of a module; its parameters are not watched here."""
        own: list[str] = []
        for name in names:
            if name in module._modules:
                self._look(path, module._modules, (name,), itemgetter)
            elif name in module._buffers:
                self._look(path, module._buffers, (name,), itemgetter)
            elif "." not in name and name not in module._parameters and _is_data(module, name):
                own.append(name)
        self._look(path, module, own, attrgetter)

    def _look(self, path: str, owner: Any, names: Iterable[str], getter: Any) -> None:
        names = tuple(names)
        if not names:
            return
        # With one name alone, a getter returns the value in place of a tuple.
        look = getter(*names, names[0])
        seen = look(owner)
        said = tuple(f"{path}.{name}".lstrip(".") for name in (*names, names[0]))
        kept = tuple(_Same(value) if isinstance(value, Tensor) else value for value in seen)
        self._entries.append(_Entry(said, look, owner, kept))
        for name, value in zip(said, seen[:-1], strict=False):
            self._follow(name, value, _MAX_DEPTH)

    def _follow(self, path: str, value: Any, depth: int) -> None:
        """Watch what is in a value."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._tensors.append((path, value, value._version))
            return
        if depth == 0 or isinstance(value, (*_PLAIN, nn.Module, ModuleType, type)):
            return
        inside = value if isinstance(value, (*_CONTAINERS, tuple)) else _fields(value)
        if isinstance(inside, _CONTAINERS):
            if any(inside is live for _, live, _ in self._contents):
                return
            self._contents.append((path, inside, inside.copy()))
        for name, each in _items(inside):
            self._follow(f"{path}.{name}", each, depth - 1)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object such as a config; those of torch's objects do not matter."""
    if callable(value) or type(value).__module__.partition(".")[0] in ("torch", "_abc"):
        return {}
    found = getattr(value, "__dict__", {})
    return found if isinstance(found, dict) else {}


def _items(inside: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(inside, Mapping):
        yield from inside.items()
    elif isinstance(inside, list | tuple):
        yield from enumerate(inside)


def _is_data(module: nn.Module, name: str) -> bool:
    """Whether a name is a value, and not a method or a property."""
    if name in vars(module):
        return True
    with suppress(AttributeError):
        return not hasattr(inspect.getattr_static(type(module), name), "__get__")
    return False


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False


def _text(value: Any) -> str:
    """A value in an error, the same on all ranks."""
    value = value.tensor if isinstance(value, _Same) else value
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


class Originals:
    """Parameters, and some buffers, of the captured model whose own values are no longer read."""

    def __init__(self, model: nn.Module, buffers: Collection[str]) -> None:
        self._model, self._buffers = model, buffers
        self.accept()

    def accept(self) -> None:
        """Take the present tensors and values as those that do not matter."""
        self._tensors = {n: t for n, t in self._named().items() if not t.is_inference()}
        modules = self._model.modules()
        self._homes = [home for m in modules for home in (m._parameters, m._modules)]
        self._kept = [home.copy() for home in self._homes]
        self._versions, self._places = self._now()

    def _named(self) -> dict[str, Tensor]:
        of_buffers = ((n, b) for n, b in self._model.named_buffers() if n in self._buffers)
        return dict([*self._model.named_parameters(), *of_buffers])

    def _now(self) -> tuple[list[int], list[int]]:
        tensors = self._tensors.values()
        return [t._version for t in tensors], [t.data_ptr() for t in tensors]

    def changed(self) -> str:
        """The name of a tensor that got other values or was replaced; empty if there is none."""
        with suppress(Exception):  # The comparison of a tensor with the one in its place.
            # Lists are compared in one call, which is several times as fast as a loop.
            if self._homes == self._kept and self._now() == (self._versions, self._places):
                return ""
        now = self._named()
        seen = zip(self._versions, self._places, strict=True)
        for (name, tensor), state in zip(self._tensors.items(), seen, strict=True):
            if now.get(name) is not tensor or (tensor._version, tensor.data_ptr()) != state:
                return name
        if new := now.keys() - self._tensors.keys():
            return min(new)
        self.accept()  # Another module without parameters.
        return ""
