"""CallOptions: what a call is asked for besides its tensors and layouts, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict, get_type_hints

import torch

from rvdcomm.api.float8 import Scale
from rvdcomm.network import Links

Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One dtype for all tensors, or some by name."""


class CallOptions(NamedTuple):
    """Options of ``redistribute`` and of ``redistribute_many``, which say what each one means.

    Either function, and ``prove`` after it, takes them as one value, by name, or both; an option
    given by name counts.

    >>> CallOptions(executor="dist")._replace(memory_limit=2**30).memory_limit
    1073741824
    """

    group: Any = None
    topology: Links | None = None
    executor: str | None = None
    memory_limit: int | None = None
    dtype: Dtypes | None = None
    shape: tuple[int, ...] | None = None
    requires_grad: bool | None = None
    replica_grads: str = "parts"
    names: Callable[[str], str] | None = None
    dst_dtype: Dtypes | None = None
    scale: Scale | Mapping[str, Scale] | None = None


class ByName(TypedDict, total=False):
    """The options of both functions as keywords; type checkers read them."""

    group: Any
    topology: Links | None
    executor: str | None
    memory_limit: int | None


class OfOne(ByName, total=False):
    """The options of ``redistribute`` as keywords."""

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    requires_grad: bool | None
    replica_grads: str


class OfMany(ByName, total=False):
    """The options of ``redistribute_many`` as keywords."""

    dtype: Dtypes | None
    names: Callable[[str], str] | None
    dst_dtype: Dtypes | None
    scale: Scale | Mapping[str, Scale] | None


AS_USUAL = CallOptions()
TAKEN = {
    "redistribute": frozenset(get_type_hints(OfOne)),
    "redistribute_many": frozenset(get_type_hints(OfMany)),
    "prove": frozenset(get_type_hints(OfMany)),
}
"""The options of each function, by its name."""

_OF_A_CALL = {
    "redistribute": ("async_op", "options", "out"),
    "redistribute_many": ("async_op", "options", "out", "progress"),
    "prove": ("check", "options"),
}
"""The other keywords of each function."""


def filled(function: str, options: CallOptions, by_name: Mapping[str, Any]) -> CallOptions:
    """The options of a call.

    Raises:
        TypeError: the function has no such option; as any wrong keyword, on this rank alone.
    """
    taken = TAKEN[function]
    if not by_name.keys() <= taken:
        _check(function, by_name.keys() - taken)
    if options is AS_USUAL:
        return CallOptions(**by_name) if by_name else options
    if not isinstance(options, CallOptions):
        raise TypeError(f"options={options!r}: it is an rvdcomm.CallOptions.")
    named = zip(options._fields, options, AS_USUAL, strict=True)
    _check(function, {name for name, given, usual in named if not _is_usual(given, usual)} - taken)
    return options._replace(**by_name)


def _is_usual(given: Any, usual: Any) -> bool:
    # Only texts are compared: a scale may be a tensor, and a text that was sent is a new object.
    return given is usual or (type(given) is str and given == usual)


def _check(function: str, unknown: set[str]) -> None:
    if unknown:
        keywords = sorted(TAKEN[function].union(_OF_A_CALL[function]))
        near = [name for each in unknown for name in get_close_matches(each, keywords, 1)]
        raise TypeError(
            f"{function} takes no {', '.join(sorted(unknown))}; its keywords are "
            f"{', '.join(keywords)}." + (f" Is it {near[0]}?" if near else "")
        )
