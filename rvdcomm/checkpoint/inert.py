"""Pickles as data: reads a pickle without importing or calling anything.

``torch.distributed.checkpoint`` describes a checkpoint by a pickle. Unpickling imports and calls
whatever the file names. Here the instructions of the pickle run on plain records: a global is its
name, and a call is a record of its function and arguments. Dictionaries are lists of pairs, because
hashing a key from a hostile file can take exponential time.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rvdcomm.errors import CheckpointError
from rvdcomm.text import quoted

MAX_BYTES = 256 << 20
"""Limit for one pickle; the description of about a million shards takes as much."""


@dataclass(frozen=True, slots=True)
class Global:
    """The full name of a class or function to which a pickle refers."""

    name: str


@dataclass(eq=False, slots=True)
class PickledCall:
    """A record of the call ``function(*args)``; unpickling would set ``state`` on its result."""

    function: Any
    args: Any
    state: Any = None


@dataclass(eq=False, slots=True)
class Pairs:
    """A dictionary as the list of its items, in the order in which they were set."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def texts(self) -> dict[str, Any]:
        """The items whose keys are texts."""
        return {key: value for key, value in self.items if isinstance(key, str)}


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to data that is stored outside of the pickle."""

    what: Any


class _StackMark:
    pass


_MARK = _StackMark()


def inert(data: bytes) -> Any:
    """The value of a pickle, as numbers, texts, tuples, lists and the records above.

    >>> import pickle
    >>> inert(pickle.dumps((1, "two", [3.0])))
    (1, 'two', [3.0])

    Raises:
        CheckpointError: the data is no pickle, or uses instructions that no checkpoint needs.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.follow(opcode.name, argument)
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        # These are raised by pickletools and our own stack for streams that no pickler writes.
        raise CheckpointError(f"it is no pickle of a checkpoint: {quoted(str(error))}") from None
    raise CheckpointError("it is a pickle that is cut off")


class _Machine:
    """The stack and the memo of an unpickler; its values are inert."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(_VALUES[name](argument))
        elif name not in _IGNORED:
            _OPERATIONS[name](self, argument)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def make_tuple(self, size: int) -> None:
        items = self.stack[-size:]
        if len(items) < size:
            raise IndexError("a tuple of more items than there are")
        self.stack[-size:] = [tuple(items)]

    def make_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a global that is no text")
        self.stack.append(Global(f"{module}.{name}"))

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        self.stack.append(PickledCall(function, args))

    def build(self) -> None:
        state = self.pop()
        self.stack[-1].state = state

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError("items for something that is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # An OrderedDict is a ``PickledCall``; nothing needs the items that it is given.
        pairs = target.items if isinstance(target, Pairs) else []
        pairs.extend(zip(items[::2], items[1::2], strict=True))


# Instructions that push their argument, or a new value, onto the stack.
_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE"),
            *("BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        ),
        lambda argument: argument,
    ),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "MARK": lambda _: _MARK,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: Pairs(),
    "EMPTY_SET": lambda _: [],
    # pickletools gives module and name with a space between.
    "GLOBAL": lambda argument: Global(".".join(argument.split(" "))),
}
_IGNORED = frozenset({"PROTO", "FRAME"})
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, i: m.stack.append(m.memo[i])),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.make_tuple(1),
    "TUPLE2": lambda m, _: m.make_tuple(2),
    "TUPLE3": lambda m, _: m.make_tuple(3),
    "STACK_GLOBAL": lambda m, _: m.make_global(),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, _: m.call()),
    "BUILD": lambda m, _: m.build(),
    "APPEND": lambda m, _: m.append([m.pop()]),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda m, _: m.append(m.pop_to_mark())),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "BINPERSID": lambda m, _: m.stack.append(Persistent(m.pop())),
}
