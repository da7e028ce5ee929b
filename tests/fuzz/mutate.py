"""Mutate: change texts at random, as typing errors or an attacker would change them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

NUMBERS = (
    *("0", "1", "2", "3", "4", "7", "64", "00", "-1", "+1", "1_0", "1e3", "0x10", "", " 1"),
    *(str(2**31 - 1), str(2**31), str(2**62), str(2**63 - 1), str(2**63), "9" * 20, "9" * 5000),
    *("1048576", "1048577", "999999999999", "٣", "１", "²", "NaN", "Infinity", "1.5", "true"),
)
WORDS = (
    *("src", "dst", "-", "s0", "r1", "rank", "copy", "add", "zero", "buffer", "collective"),
    *("all_to_all", "all_gather", "all_reduce", "step", "ranks", "program", "float32", "int8"),
    *("bool", "float8_e8m0fnu", "complex64", "cuts", "shape", "balanced", "chunk", "levels"),
)
PIECES = ("\0", "\n", "\r", "\x0c", "\u2028", "\ud800", "💣", " ", "  ", "@", ">", "->", ":", ",",
          ";", "(", ")", "[", "]", "[]", "{", "}", '"', "\\", "#", "//", "[" * 3000, "(" * 300,
          "0:1048576", "0:999999999", "R(1)V(1)D()", "[0:0]", "[0:1,0:1]")  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 1e308, 2**63, 10**400, "", "x", [], {}, [[]], [None], {"": None},
)  # fmt: skip


def mutated(rng: random.Random, text: str, other: str) -> str:
    """``text`` with some damage; pieces may be taken from ``other``."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        text = rng.choice(MUTATORS)(rng, text, other)
    return text


def _number(rng: random.Random, text: str, other: str) -> str:
    return _replace(rng, text, r"\d+", rng.choice(NUMBERS))


def _nudge(rng: random.Random, text: str, other: str) -> str:
    """Change a number by one; this mistake is the most likely one, and the hardest to detect."""
    found = rng.choice(list(re.finditer(r"\d{1,9}", text)) or [None])
    if found is None:
        return text
    near = str(max(0, int(found[0]) + rng.choice([-1, 1])))
    return text[: found.start()] + near + text[found.end() :]


def _trade(rng: random.Random, text: str, other: str) -> str:
    """Swap two numbers."""
    found = list(re.finditer(r"\d+", text))
    if len(found) < 2:
        return text
    a, b = sorted(rng.sample(found, 2), key=lambda match: match.start())
    return text[: a.start()] + b[0] + text[a.end() : b.start()] + a[0] + text[b.end() :]


def _word(rng: random.Random, text: str, other: str) -> str:
    return _replace(rng, text, r"[A-Za-z_]\w*|-", rng.choice(WORDS))


def _replace(rng: random.Random, text: str, pattern: str, new: str) -> str:
    found = rng.choice(list(re.finditer(pattern, text)) or [None])
    return text if found is None else text[: found.start()] + new + text[found.end() :]


def _piece(rng: random.Random, text: str, other: str) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(PIECES) + text[at:]


def _cut(rng: random.Random, text: str, other: str) -> str:
    return text[: rng.randint(0, len(text))]


def _drop(rng: random.Random, text: str, other: str) -> str:
    a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    return text[:a] + text[min(b, a + 12) :]


def _repeat(rng: random.Random, text: str, other: str) -> str:
    a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    return text[:a] + text[a:b] * rng.choice([2, 2, 3, 50]) + text[b:] if b - a < 500 else text


def _lines(rng: random.Random, text: str, other: str) -> str:
    """Delete, copy or swap lines, or replace a line by a line of ``other``."""
    lines = text.split("\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[a]
        case 1:
            lines.insert(b, lines[a])
        case 2:
            lines[a], lines[b] = lines[b], lines[a]
        case _:
            lines[a] = rng.choice(other.split("\n"))
    return "\n".join(lines)


def _join(rng: random.Random, text: str, other: str) -> str:
    return text[: rng.randint(0, len(text))] + other[rng.randint(0, len(other)) :]


def _json(rng: random.Random, text: str, other: str) -> str:
    """Replace a value of a JSON text."""
    try:
        value = json.loads(text)
        holder, key = rng.choice(list(_places(value)) or [({"": None}, "")])
        holder[key] = rng.choice(JUNK)
        return json.dumps(value)
    except (ValueError, RecursionError):
        return text


def _places(value: Any) -> Any:
    """The place of every value inside ``value``, as (container, key)."""
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


MUTATORS: tuple[Callable[[random.Random, str, str], str], ...] = (
    *(_number, _nudge, _nudge, _nudge, _trade, _trade, _word, _piece, _cut, _drop, _repeat),
    *(_lines, _lines, _lines, _join, _json, _json),
)
