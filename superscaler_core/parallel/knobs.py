"""Knobs: options of plans as texts, such as ``hybrid:tp=2,pp=2``; only this table parses them.

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
from superscaler_core.graph.blocks import find_blocks
from superscaler_core.graph.modules import Modules
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.plan import Keep, Plan
from superscaler_core.plan.mesh import Mesh
from superscaler_core.planners.gspmd import gspmd
from superscaler_core.planners.stages import STAGE_PLANNERS, stages
from superscaler_core.planners.tofu import tofu
from superscaler_core.plans import PLANS
from superscaler_core.plans.pieces.axial import Cut
from superscaler_core.plans.pieces.mesh_layout import MeshLayout
from superscaler_core.schedules import SCHEDULES

SPROGRAMS: Mapping[str, Callable[..., None]] = {
    **PLANS,
    "stages": stages,
    "tofu": tofu,
    "gspmd": gspmd,
}
"""The sPrograms that a text may name."""


def parse_plan(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a plan and the values of its knobs; for a plan not shipped, the whole text.

    Raises:
        PlanError: the plan has no such knob, or a value has another form; the message has the
            plan's knobs, or the form.

    >>> parse_plan("hybrid:tp=2,sizes=3,1")
    ('hybrid', {'tp': 2, 'sizes': (3, 1)})
    >>> parse_plan("mine.py:split")
    ('mine.py:split', {})
    """
    name, _, rest = text.partition(":")
    if name not in SPROGRAMS:
        return text, {}
    takes = [*inspect.signature(SPROGRAMS[name]).parameters.values()][1:]
    defaults = {parameter.name: parameter.default for parameter in takes}
    found = {}
    # A comma that no new knob follows is in a value.
    for word in re.split(r",(?=\s*\w+\s*=)", rest) if rest else ():
        knob, equals, value = (part.strip() for part in word.partition("="))
        if not equals or knob not in {*defaults, *PARTS}:
            raise PlanError(
                f"{text}: expected {name}:KNOB=VALUE,KNOB=VALUE, not {word.strip()!r}; {name} "
                f"takes {', '.join(defaults) or 'nothing'}, and every plan {', '.join(PARTS)}."
            )
        found[knob] = value_of(name, knob, value)
    return name, found


def value_of(plan: str, knob: str, value: Any) -> Any:
    """The value of a knob of a shipped plan; a text is read as one that follows the plan's name.

    >>> value_of("hybrid", "tp", "2"), value_of("hybrid", "tp", 2)
    (2, 2)

    Raises:
        PlanError: the text has another form than such values.
    """
    if not isinstance(value, str):
        return value
    takes = inspect.signature(SPROGRAMS[plan]).parameters
    reader = {**READERS, **PARTS}.get(knob)
    if reader is None and knob in takes:
        reader = reader_of(takes[knob].default)
    return value if reader is None else read(f"{plan}:{knob}={value}", value, reader)


def counts(text: str) -> tuple[int, ...]:
    """Counts, such as ``3,2``."""
    return tuple(_number(word) for word in _words(text, ","))


def numbers(text: str) -> tuple[int, ...] | None:
    """Numbers and ranges, such as ``0-3,8``; None, which means all, for an empty text."""
    found: set[int] = set()
    for word in _words(text, ","):
        first, _, last = word.partition("-")
        found.update(range(_number(first), _number(last or first) + 1))
    return tuple(sorted(found)) or None


def modules(text: str) -> Modules:
    """Patterns of module paths, such as ``layers.*.outer,layers.*.tri_*``."""
    return Modules(*_words(text, ","))


def branches(text: str) -> tuple[Modules, ...]:
    """Patterns of several branches, separated by semicolons."""
    return tuple(map(modules, _words(text, ";")))


def cuts(text: str) -> tuple[Cut, ...]:
    """Patterns with one dim or two, such as ``*.tri_in:2,*.outer:2>1``."""
    found = []
    for word in _words(text, ","):
        pattern, _, dims = word.rpartition(":")
        first, arrow, then = dims.partition(">")
        if not pattern:
            raise ValueError(word)
        found.append(Cut(Modules(pattern), _number(first), _number(then) if arrow else None))
    return tuple(found)


def dims(text: str) -> tuple[tuple[str, int], ...]:
    """Parameters with one dim each, such as ``*.fc1.weight:0,*.q.weight:0``."""
    found = []
    for word in _words(text, ","):
        name, _, dim = word.rpartition(":")
        if not name:
            raise ValueError(word)
        found.append((name, _number(dim)))
    return tuple(found)


def specs(text: str) -> dict[str, ShardSpec]:
    """Specs by names with ``*``, such as ``tokens:d0@x;*.up.weight:d0@y``."""
    found = {}
    for word in _words(text, ";"):
        name, _, spec = word.rpartition(":")
        if not name:
            raise ValueError(word)
        found[name.strip()] = ShardSpec.parse(spec)
    return found


def truth(text: str) -> bool:
    """Yes or no."""
    return _TRUTHS[text.lower()]


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

TextReader = tuple[Callable[[str], Any], str]
"""Parses a text, with a description of the expected form."""

READERS: Mapping[str, TextReader] = {
    "sizes": (counts, "whole numbers with commas between, such as 3,2"),
    "lengths": (counts, "whole numbers with commas between, such as 40,24"),
    "route": (str, "line, v or both"),
    "blocks": (numbers, "numbers of blocks, such as 0-3,8"),
    "coshard_blocks": (numbers, "numbers of blocks, such as 0-3,8"),
    "modules": (cuts, "PATTERN:DIM or PATTERN:DIM>DIM with commas between, such as *.tri_in:2"),
    "branches": (branches, "patterns of modules with commas between; semicolons between branches"),
    "schedule": (SCHEDULES.__getitem__, f"one of {', '.join(SCHEDULES)}"),
    "planner": (STAGE_PLANNERS.__getitem__, f"one of {', '.join(STAGE_PLANNERS)}"),
    "profile": (PROFILES.__getitem__, f"one of {', '.join(PROFILES)}"),
    "topology": (rv.Topology.load, "a JSON file that rvdcomm.Topology.save wrote"),
    "layout": (
        MeshLayout.parse,
        "DIM:SIDE with semicolons between, such as batch:rows;hidden:cols",
    ),
    "memory_bytes": (parse_bytes, "bytes, such as 32GiB"),
    "mesh": (Mesh.parse, "NAME:DEVICES with commas between, such as x:2,y:4"),
    "specs": (specs, "NAME:SPEC with semicolons between, such as tokens:d0@x;*.up.weight:d0@y"),
    "keep": (Keep, f"one of {', '.join(map(str, Keep))}"),
    "keep_coshard": (Keep, f"one of {', '.join(map(str, Keep))}"),
}
"""Options of shipped plans whose values are not numbers, by name."""

PARTS: Mapping[str, TextReader] = {
    "block": (modules, "a pattern of modules' paths, such as layers.*"),
    "features": (dims, "NAME:DIM with commas between, such as *.fc1.weight:0"),
    "experts": (modules, "a pattern of modules' paths, such as *.experts"),
    "embedding": (str, "the name of a parameter"),
}
"""Options of every plan: parts of the model that the search by structure does not find."""

_TAKES = {"block": "blocks"}
"""The name of an option's parameter in ``find_blocks``, where it differs."""


def reader_of(default: Any) -> TextReader:
    """How to parse a value of the same type as a default."""
    if isinstance(default, bool):
        return truth, "true or false, such as " + str(default)
    if isinstance(default, Keep):
        return READERS["keep"]
    if isinstance(default, int | float):
        kind = "a whole number" if isinstance(default, int) else "a number"
        return type(default), f"{kind}, such as {default}"
    if isinstance(default, tuple):
        shown = ",".join(map(str, default))
        return _integers, f"whole numbers with commas between, such as {shown}"
    return str, "a text"


def read(given: str, text: str, reader: TextReader) -> Any:
    """Parse a value.

    Raises:
        PlanError: the text has another form; the message shows what was given and the right form.
    """
    parse, expected = reader
    try:
        return parse(text)
    except (KeyError, ValueError):
        raise PlanError(f"{given}: expected {expected}.") from None


def with_parts(plan: Plan, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Set the parts of the plan's model; return the other options."""
    parts = {_TAKES.get(name, name): knobs[name] for name in PARTS if name in knobs}
    if parts:
        plan.blocks = find_blocks(plan.graph, **parts)
    return {name: value for name, value in knobs.items() if name not in PARTS}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _words(text: str, separator: str) -> list[str]:
    return [word.strip() for word in text.split(separator) if word.strip()]


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(text)
    return int(text)
