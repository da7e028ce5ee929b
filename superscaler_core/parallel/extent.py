"""Extent: how a tensor of one microbatch relates to the same tensor of the whole batch.

With n microbatches, a tensor is one of four kinds:

- ``Rows``: one dim has the samples; a sample's part depends on this sample alone.
- ``Total``: a sum or mean over the samples of the microbatch.
- ``Same``: it depends on no sample.
- ``Mixed``: it depends on several samples in another way, so microbatches do not compute it.

Each of the first three has a ``degree`` d, which counts factors of the number of samples:
the value of the whole batch is n^d times that of the microbatch (Rows, Same), or n^d times the sum
over microbatches (Total). So a sum has degree 0, and a mean has degree -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from superscaler_core.graph.annotation_text import Dim
from superscaler_core.graph.sliding import SlidingWindow


@dataclass(frozen=True, slots=True)
class Place:
    """Where the samples are in a dim or loop: its size is outer * samples * inner."""

    outer: int = 1
    inner: int = 1

    def sample_of(self, index: int, num: int) -> int:
        """The sample to which an index belongs, of ``num`` samples."""
        return index // self.inner % num


class Kind(Enum):
    """The kinds of extents."""

    ROWS = "rows"
    TOTAL = "total"
    SAME = "same"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class BatchExtent:
    """How a tensor of a microbatch relates to that of the whole batch.

    Attributes:
        kind: one of four.
        degree: the power of the number of microbatches, as above.
        dim, place: the dim of Rows that has the samples, and where in it they are.
        is_known: whether it follows from the batch alone: it depends on no parameter, no buffer
            that changes and no random number.
        given: the inputs with samples on which it depends; of Mixed, those that are mixed.
        routed: modules whose experts it depends on.
        is_whole: whether microbatches read the value of the whole batch, which is found before the
            step; it is then Same.
        why: of Mixed, the op at fault and what it does.
    """

    kind: Kind
    degree: int = 0
    dim: int = 0
    place: Place = Place()
    is_known: bool = True
    given: frozenset[str] = frozenset()
    routed: frozenset[str] = frozenset()
    is_whole: bool = False
    why: str = ""

    @property
    def is_rows(self) -> bool:
        return self.kind is Kind.ROWS

    @property
    def is_total(self) -> bool:
        return self.kind is Kind.TOTAL

    @property
    def is_mixed(self) -> bool:
        return self.kind is Kind.MIXED


SAME = BatchExtent(Kind.SAME)
UNKNOWN = BatchExtent(Kind.SAME, is_known=False)


def mixed(why: str) -> BatchExtent:
    """An extent of a tensor that no sum over microbatches gives."""
    return BatchExtent(Kind.MIXED, is_known=False, why=why)


def place_in_loop(
    operand: Sequence[Dim], extent: BatchExtent, sizes: Mapping[str, int], num: int
) -> tuple[str, Place] | None:
    """The loop of an operand that has the samples, and where in it; None if it is not one loop."""
    dim = operand[extent.dim]
    if isinstance(dim, SlidingWindow):
        return None
    for i, loop in enumerate(dim):
        after = prod(sizes[each] for each in dim[i + 1 :])
        inner, rest = divmod(extent.place.inner, after)
        if not rest and inner and sizes[loop] % (inner * num) == 0:
            return loop, Place(sizes[loop] // (inner * num), inner)
    return None


def place_in_dim(
    operand: Sequence[Dim], loop: str, place: Place, sizes: Mapping[str, int]
) -> list[tuple[int, Place]]:
    """The dims of an operand that a loop with samples is in, and where in them the samples are."""
    found = []
    for number, dim in enumerate(operand):
        if not isinstance(dim, SlidingWindow) and loop in dim:
            at = dim.index(loop)
            before, after = (prod(map(sizes.__getitem__, x)) for x in (dim[:at], dim[at + 1 :]))
            found.append((number, Place(before * place.outer, place.inner * after)))
    return found
