"""RVD: counts of replicas, value parts and splits per dim (SuperScaler's notation)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from rvdcomm.errors import LayoutError
from rvdcomm.layout.box import MAX_DIMS
from rvdcomm.text import integer, quoted

_SPLITS = f"(?:[0-9]+(?:,[0-9]+){{0,{MAX_DIMS - 1}}})?"


@dataclass(frozen=True, slots=True, order=True, init=False)
class RVD:
    """Counts of replicas, value parts and splits per dim: ``R(2)V(1)D(1,4)``.

    Laws (tests/layout/test_rvd.py): ``RVD.parse(str(x)) == x``; ``x.num_ranks == r * v * prod(d)``.

    >>> RVD("R(2)V(1)D(1,4)").num_ranks
    8

    Raises:
        LayoutError: the text does not parse, or a count is below 1.
    """

    r: int
    v: int
    d: tuple[int, ...]

    def __init__(
        self, r: str | RVD | int, v: int | None = None, d: tuple[int, ...] | None = None
    ) -> None:
        if isinstance(r, str | RVD):
            r, v, d = _parse(str(r))
        if v is None or d is None:
            raise LayoutError(f"RVD({r!r}) needs a text such as 'R(2)V(1)D(1,4)', or r, v and d.")
        d = tuple(d)
        if any(type(count) is not int or count < 1 for count in (r, v, *d)):
            raise LayoutError(
                f"RVD counts must be integers of at least 1, got r={quoted(r)}, v={quoted(v)}, "
                f"d={quoted(d)}."
            )
        if len(d) > MAX_DIMS:
            raise LayoutError(f"RVD with {len(d)} dims: a tensor has at most {MAX_DIMS}.")
        object.__setattr__(self, "r", r)
        object.__setattr__(self, "v", v)
        object.__setattr__(self, "d", d)

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout needs: ``r * v * prod(d)``."""
        return self.r * self.v * prod(self.d)

    @property
    def counts(self) -> tuple[int, ...]:
        """The counts in the order of the rank numbering: ``(r, v, *d)``, R outermost."""
        return (self.r, self.v, *self.d)

    def __str__(self) -> str:
        return f"R({self.r})V({self.v})D({','.join(map(str, self.d))})"

    @classmethod
    def parse(cls, text: str) -> RVD:
        """Read the text that ``str`` writes."""
        return cls(text)


def _parse(text: str) -> tuple[int, int, tuple[int, ...]]:
    """The counts in ``text``; an error names the column that does not fit, counted from 1."""
    position = 0
    fields: list[str] = []
    for letter, counts in (("R", "[0-9]+"), ("V", "[0-9]+"), ("D", _SPLITS)):
        for token in (f"{letter}(", counts, ")"):
            pattern = token if token == counts else re.escape(token)
            found = re.compile(pattern).match(text, position)
            if found is None:
                expected = {counts: "a count"}.get(token, repr(token))
                raise LayoutError(
                    f"cannot parse layout {quoted(text)}: expected {expected} at column "
                    f"{position + 1}."
                )
            if token == counts:
                fields.append(found.group())
            position = found.end()
    if position != len(text):
        raise LayoutError(
            f"cannot parse layout {quoted(text)}: expected the end at column {position + 1}."
        )
    r, v, d = fields
    return integer(r), integer(v), tuple(integer(count) for count in d.split(",") if count)
