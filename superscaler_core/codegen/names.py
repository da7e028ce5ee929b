"""Names: Python identifiers for tensors, unique in one generated file."""

from __future__ import annotations

import keyword
import re
from collections.abc import Hashable, Iterable
from copy import copy

_NO_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]+")

_FUNCTION = re.compile(r"stage[0-9]+_")
"""How the names of a file's functions begin, which a variable must not hide."""

RESERVED = frozenset(
    ("run", "rng", "mb", "other", "torch", "F", "ops", "join", "float", "next", "tuple")
)
"""Names that generated code already uses for something else."""


class Names:
    """The variable names of one file; a value keeps its first name.

    Args:
        imports: the Python modules that the file imports for ops of the user.
    """

    def __init__(self, imports: Iterable[str] = ()) -> None:
        self._of: dict[Hashable, str] = {}
        self._taken = {*RESERVED, *(module.partition(".")[0] for module in imports)}
        self._half = 0

    def of_half(self, half: int) -> Names:
        """The names of a microbatch's half: in each half a value has a name of its own."""
        names = copy(self)
        names._half = half
        return names

    def of(self, value: Hashable, wish: str) -> str:
        """The name of a value, derived from a wish such as ``layers.0.attn.q.linear``."""
        key = self._half, value
        if key not in self._of:
            base = _NO_IDENTIFIER.sub("_", wish).strip("_") or "x"
            if base[0].isdigit() or keyword.iskeyword(base) or _FUNCTION.match(base):
                base = f"x_{base}"
            name, count = base, 1
            while name in self._taken:
                count += 1
                name = f"{base}_{count}"
            self._taken.add(name)
            self._of[key] = name
        return self._of[key]
