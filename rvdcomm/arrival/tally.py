"""Tally: the digests that one rank knows, and how those of all ranks are compared.

Digests can be added, also over tensors: their number is one more index. So ranks compare one sum
for each copy first, however many tensors there are. Only for copies whose sums differ do they
exchange the digests of single tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rvdcomm.arrival.copies import Copy
from rvdcomm.arrival.digests import factor
from rvdcomm.layout import MAX_DIMS

_TENSORS = MAX_DIMS + 1
"""The dim along which tensors are numbered: after all dims of a tensor, and that of its words."""

_MODULUS = 1 << 64

Digests = dict[Copy, dict[int, int]]
"""By copy, the digest of each tensor by its number."""

Posted = Iterable[Mapping[str, Mapping[str, Any]]]
"""What all ranks posted."""


class Mismatch(NamedTuple):
    """A copy of tensor ``number`` whose digest is ``found`` where its owners have ``expected``."""

    copy: Copy
    number: int
    expected: int
    found: int


class Tally:
    """The digests of one rank, of values that it owns and of copies that it holds."""

    def __init__(self) -> None:
        self.owned: Digests = {}
        self.held: Digests = {}

    def own(self, number: int, copies: Iterable[Copy], digest: int) -> None:
        """Count a box that this rank owns for all copies that have it."""
        for copy in copies:
            known = self.owned.setdefault(copy, {})
            known[number] = (known.get(number, 0) + digest) % _MODULUS

    def hold(self, number: int, copy: Copy, digest: int) -> None:
        """Count a copy that this rank holds."""
        self.held.setdefault(copy, {})[number] = digest

    def sums(self) -> dict[str, dict[str, int]]:
        """One number for each copy, over all tensors; a post for the other ranks."""
        return {
            "owned": {str(copy): _sum(digests) for copy, digests in self.owned.items()},
            "held": {str(copy): _sum(digests) for copy, digests in self.held.items()},
        }

    def details(self, copies: Iterable[Copy]) -> dict[str, dict[str, list[tuple[int, int]]]]:
        """The digests of all tensors for some copies; a post for the other ranks."""
        copies = list(copies)
        return {
            noun: {str(copy): sorted(side[copy].items()) for copy in copies if copy in side}
            for noun, side in (("owned", self.owned), ("held", self.held))
        }


def differing(posts: Posted) -> list[Copy]:
    """The copies whose digests differ, given the ``sums`` of all ranks."""
    totals: dict[str, int] = {}
    for post in posts:
        for sign, noun in ((1, "owned"), (-1, "held")):
            for copy, number in post[noun].items():
                totals[copy] = (totals.get(copy, 0) + sign * number) % _MODULUS
    return sorted(Copy.parse(copy) for copy, total in totals.items() if total)


def mismatches(posts: Posted) -> Iterator[Mismatch]:
    """What differs, by copy and tensor, given the ``details`` of all ranks."""
    digests: dict[tuple[Copy, int], dict[str, int]] = {}
    for post in posts:
        for noun in ("owned", "held"):
            for copy, pairs in post[noun].items():
                for number, digest in pairs:
                    pair = digests.setdefault((Copy.parse(copy), number), {"owned": 0, "held": 0})
                    pair[noun] = (pair[noun] + digest) % _MODULUS
    for place, pair in sorted(digests.items()):
        if pair["owned"] != pair["held"]:
            yield Mismatch(*place, pair["owned"], pair["held"])


def _sum(digests: Mapping[int, int]) -> int:
    return sum(factor(_TENSORS, i) * digest for i, digest in digests.items()) % _MODULUS
