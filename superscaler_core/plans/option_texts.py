"""Options: options of plans as texts, such as ``hybrid:tp=2,pp=2``; only this table parses them.

Functions of the Python API take values.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import rvdcomm as rv
from rvdcomm.units import parse_bytes
from superscaler_core.cost import PROFILES
from superscaler_core.errors import PlanError
from superscaler_core.graph.modules import Modules
from superscaler_core.plan import Keep, Overlap
from superscaler_core.plan.mesh import Mesh
from superscaler_core.plans.pieces.axial import Cut
from superscaler_core.plans.row import OptionReader, row_of
from superscaler_core.plans.table import PLANS
from superscaler_core.schedules import SCHEDULES


def parse_plan(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a plan and the values of its options; for a plan not shipped, the whole text.

    Raises:
        PlanError: the plan has no such option, or a value has another form; the message has the
            plan's options, or the form.

    >>> parse_plan("hybrid:tp=2,sizes=3,1")
    ('hybrid', {'tp': 2, 'sizes': (3, 1)})
    >>> parse_plan("mine.py:split")
    ('mine.py:split', {})
    """
    name, _, rest = text.partition(":")
    if name not in PLANS:
        return text, {}
    takes = [*inspect.signature(PLANS[name]).parameters.values()][1:]
    defaults = {parameter.name: parameter.default for parameter in takes}
    found = {}
    # A comma that no new option follows is in a value.
    for word in re.split(r",(?=\s*\w+\s*=)", rest) if rest else ():
        option, equals, value = (part.strip() for part in word.partition("="))
        if not equals or option not in {*defaults, *EVERY}:
            raise PlanError(
                f"{text}: expected {name}:OPTION=VALUE,OPTION=VALUE, not {word.strip()!r}; {name} "
                f"takes {', '.join(defaults) or 'nothing'}, and every plan {', '.join(EVERY)}."
            )
        if option in found:
            raise PlanError(f"{text}: {option} is said twice.")
        found[option] = value_of(name, option, value)
    return name, found


def value_of(plan: str | Callable[..., None], option: str, value: Any) -> Any:
    """The value of an option of a plan; a text is read as one that follows the plan's name.

    Of a function that is no shipped plan, only options of every plan are read.

    >>> value_of("hybrid", "tp", "2"), value_of("hybrid", "tp", 2)
    (2, 2)

    Raises:
        PlanError: the text has another form than such values.
    """
    if not isinstance(value, str):
        return value
    name = plan if isinstance(plan, str) else getattr(plan, "__name__", type(plan).__name__)
    function = PLANS[plan] if isinstance(plan, str) else plan
    takes = inspect.signature(function).parameters
    if isinstance(plan, str):
        reader = readers_of(function).get(option)
        if reader is None and option in takes:
            reader = reader_of(takes[option].default)
    else:
        reader = None if option in takes else EVERY.get(option)
    return value if reader is None else read(f"{name}:{option}={value}", value, reader)


def readers_of(fill: Callable[..., None]) -> Mapping[str, OptionReader]:
    """The readers of a plan's options; others are read by the type of their default."""
    return {**READERS, **EVERY, **row_of(fill).readers}


def counts(text: str) -> tuple[int, ...]:
    """Counts, such as ``3,2``."""
    return tuple(_number(word) for word in words(text, ","))


def numbers(text: str) -> tuple[int, ...] | None:
    """Numbers and ranges, such as ``0-3,8``; None, which means all, for an empty text."""
    found: set[int] = set()
    for word in words(text, ","):
        first, _, last = word.partition("-")
        found.update(range(_number(first), _number(last or first) + 1))
    return tuple(sorted(found)) or None


def modules(text: str) -> Modules:
    """Patterns of module paths, such as ``layers.*.outer,layers.*.tri_*``."""
    return Modules(*words(text, ","))


def cuts(text: str) -> tuple[Cut, ...]:
    """Patterns with one dim or two, such as ``*.tri_in:2,*.outer:2>1``."""
    found = []
    for word in words(text, ","):
        pattern, _, dims = word.rpartition(":")
        first, arrow, then = dims.partition(">")
        if not pattern:
            raise ValueError(word)
        found.append(Cut(Modules(pattern), _number(first), _number(then) if arrow else None))
    return tuple(found)


def dims(text: str) -> tuple[tuple[str, int], ...]:
    """Parameters with one dim each, such as ``*.fc1.weight:0,*.q.weight:0``."""
    found = []
    for word in words(text, ","):
        name, _, dim = word.rpartition(":")
        if not name:
            raise ValueError(word)
        found.append((name, _number(dim)))
    return tuple(found)


def truth(text: str) -> bool:
    """Yes or no."""
    return _TRUTHS[text.lower()]


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _truth_or_number(text: str) -> bool | int:
    return _TRUTHS[text.lower()] if text.lower() in _TRUTHS else _number(text)


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(text)
    return int(text)


def _overlap(text: str) -> Overlap | bool:
    return _TRUTHS[text.lower()] if text.lower() in _TRUTHS else Overlap.parse(text)


_BLOCKS = OptionReader(numbers, "numbers of blocks, such as 0-3,8")
MESH_TEXT = OptionReader(Mesh.parse, "NAME:DEVICES with commas between, such as x:2,y:4")
_KEEP = OptionReader(Keep, {str(keep): keep for keep in Keep})

READERS: Mapping[str, OptionReader] = {
    "sizes": OptionReader(counts, "whole numbers with commas between, such as 3,2"),
    "blocks": _BLOCKS,
    "coshard_blocks": _BLOCKS,
    "modules": OptionReader(
        cuts, "PATTERN:DIM or PATTERN:DIM>DIM with commas between, such as *.tri_in:2"
    ),
    "schedule": OptionReader.named(SCHEDULES),
    "profile": OptionReader.named(PROFILES),
    "topology": OptionReader(rv.Topology.load, "a JSON file that rvdcomm.Topology.save wrote"),
    "memory_bytes": OptionReader(parse_bytes, "bytes, such as 32GiB"),
    "keep": _KEEP,
    "keep_coshard": _KEEP,
}
"""Options of several plans whose values are not numbers, by name; ``plan_row`` has a plan's own."""

EVERY: Mapping[str, OptionReader] = {
    "block": OptionReader(modules, "a pattern of modules' paths, such as layers.*"),
    "features": OptionReader(dims, "NAME:DIM with commas between, such as *.fc1.weight:0"),
    "expert": OptionReader(modules, "a pattern of modules' paths, such as *.experts"),
    "embedding": OptionReader(str, "the name of a parameter"),
    "experts": OptionReader(
        _truth_or_number, "true or false, or the number of devices to which experts are dealt out"
    ),
    "microbatches": OptionReader(_number, "the number of microbatches in a step, such as 4"),
    "zero": OptionReader(_number, "1 for states, 2 for gradients too, 3 for weights too"),
    "shard": OptionReader(_number, "the number of devices among which storage is cut, such as 8"),
    "whole": OptionReader(truth, "true or false: whether whole parameters are dealt out"),
    "keep": _KEEP,
    "overlap": OptionReader(
        _overlap, "true, or some of: prefetch NUMBER, reductions, moves, duplex, pairs"
    ),
}
"""Options of every plan, the names of ``every.NAMES``."""


def reader_of(default: Any) -> OptionReader:
    """How to parse a value of the same type as a default."""
    if isinstance(default, bool):
        return OptionReader(truth, "true or false, such as " + str(default))
    if isinstance(default, Keep):
        return READERS["keep"]
    if isinstance(default, int | float):
        kind = "a whole number" if isinstance(default, int) else "a number"
        return OptionReader(type(default), f"{kind}, such as {default}")
    if isinstance(default, tuple):
        shown = ",".join(map(str, default))
        return OptionReader(_integers, f"whole numbers with commas between, such as {shown}")
    return OptionReader(str, "a text")


def read(given: str, text: str, reader: OptionReader) -> Any:
    """Parse a value.

    Raises:
        PlanError: the text has another form; the message shows what was given and the right form.
    """
    try:
        return reader.parse(text)
    except (KeyError, ValueError):
        raise PlanError(f"{given}: expected {reader.form}.") from None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def words(text: str, separator: str) -> list[str]:
    """The words between separators that are not empty."""
    return [word.strip() for word in text.split(separator) if word.strip()]
