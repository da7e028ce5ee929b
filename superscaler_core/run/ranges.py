"""Ranges: shows the instructions of a rank in traces of torch's profiler, by the plan's names.

Both the executor and printed files call methods of a rank, and all that run an instruction pass
here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch.autograd import profiler

from superscaler_core.run.tables import SubTransfer, Tables
from superscaler_core.run.trail import Mark, Trail

P = ParamSpec("P")
T = TypeVar("T")


class _Seen(Protocol):
    """A rank whose instructions are seen."""

    trail: Trail
    tables: Tables


S = TypeVar("S", bound=_Seen)

_NOTHING = nullcontext()


def is_profiled() -> bool:
    """Whether a profiler of torch runs in this process."""
    return profiler._is_profiler_enabled


def instruction(
    num_named: int, words: str = ""
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """A method of a rank that runs an instruction: it is noted, and profilers see it.

    Law (tests/superscaler_core/run/test_ranges.py): a step has one range for every instruction of
    its program that does something on the rank, with the instruction's name.

    Args:
        num_named: the number of the method's first arguments that say to what it does something.
            They are no tensors: the trail would keep their memory.
        words: what the method does; its name if empty.
    """

    def seen(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        does = words or method.__name__.replace("_", " ")

        @wraps(method)
        def call(rank: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            rank.trail.note(does, args[:num_named])
            if not profiler._is_profiler_enabled:  # ``is_profiled``, without its call.
                return method(rank, *args, **kwargs)
            name = Mark(does, args[:num_named], 0).text
            with profiler.record_function(name + _how(rank.tables, does, args)):
                return method(rank, *args, **kwargs)

        return call

    return seen


def inner_range(words: str, *given: Any) -> AbstractContextManager[Any]:
    """A range inside that of an instruction, if a profiler runs; it is not noted."""
    if not is_profiled():
        return _NOTHING
    return profiler.record_function(Mark(words, given, 0).text)


def _how(tables: Tables, words: str, args: tuple[Any, ...]) -> str:
    """Between which layouts an edge moves; nothing for what is no move, or for its wait."""
    edge = tables.edges.get(args[0]) if args and isinstance(args[0], str) else None
    if edge is None or words.startswith(("wait", "receive")):
        return ""
    return _layouts(edge.backward if words.endswith("back") else edge.forward)


def _layouts(moved: tuple[SubTransfer, ...]) -> str:
    if len(moved) != 1:
        return f": {len(moved)} regions"
    src, dst = moved[0].layouts
    return f": {src.rvd} -> {dst.rvd}"
