"""ShardSpec: along which axes of a mesh the dims of a tensor are cut, such as ``d0@x, d1@y``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from superscaler_core.errors import AnnotationError

Axes = tuple[str, ...]
"""Axes of a mesh that cut one dim, outermost first; ``()`` leaves the dim whole."""

_WORD = re.compile(r"(?:d(\d+)|\*)@(-|[A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*)")
_FORM = "a spec is words such as d0@x, d1@y*z, d2@- and *@-, with commas between"


@dataclass(frozen=True)
class ShardSpec:
    """How the dims of one tensor are cut along mesh axes, independent of the sizes of the mesh.

    ``d0@x`` cuts dim 0 along axis x; ``d0@x*y`` cuts it along x, and every piece along y; ``d0@-``
    leaves it whole. ``*@-`` leaves every other dim whole. A dim that is not mentioned is open: the
    planner chooses.

    Laws (tests/superscaler_core/graph/test_shard_spec.py): ``ShardSpec.parse(str(x)) == x``; the
    order of the words does not matter for equality.

    >>> spec = ShardSpec.parse("d1@y, d0@x*z, *@-")
    >>> str(spec), spec.said(3)
    ('d0@x*z, d1@y, *@-', {0: ('x', 'z'), 1: ('y',), 2: ()})

    Attributes:
        dims: the dims that are named, ascending, with their axes.
        others_whole: whether all other dims are whole; otherwise they are open.
    """

    dims: tuple[tuple[int, Axes], ...] = ()
    others_whole: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(sorted(self.dims)))
        numbers = [str(dim) for dim, _ in self.dims]
        used = [axis for _, axes in self.dims for axis in axes]
        for what, given in (("dim", numbers), ("axis", used)):
            twice = next((each for each in given if given.count(each) > 1), None)
            if twice is not None:
                raise AnnotationError(
                    f"spec {str(self)!r}: {what} {twice} is there twice; a dim is named once, and "
                    "an axis cuts one dim of a tensor."
                )

    @property
    def axes(self) -> frozenset[str]:
        """All axes that the spec names."""
        return frozenset(axis for _, axes in self.dims for axis in axes)

    def said(self, rank: int) -> Mapping[int, Axes]:
        """For a tensor with ``rank`` dims, the axes of every dim that is not open.

        Raises:
            AnnotationError: the spec names a dim that the tensor does not have.
        """
        if self.dims and self.dims[-1][0] >= rank:
            raise AnnotationError(
                f"spec {str(self)!r} of a tensor with {rank} dims: there is no dim "
                f"{self.dims[-1][0]}; the first is dim 0."
            )
        others: dict[int, Axes] = dict.fromkeys(range(rank), ()) if self.others_whole else {}
        return others | dict(self.dims)

    def __str__(self) -> str:
        words = [f"d{dim}@{'*'.join(axes) or '-'}" for dim, axes in self.dims]
        return ", ".join([*words, *(["*@-"] if self.others_whole else [])])

    @classmethod
    def parse(cls, text: str) -> ShardSpec:
        """Read the text that ``str`` writes; an empty text leaves all dims open.

        Raises:
            AnnotationError: the text has another form, or names a dim or an axis twice.
        """
        dims: list[tuple[int, Axes]] = []
        others = False
        for word in filter(None, map(str.strip, text.split(","))):
            found = _WORD.fullmatch(word)
            if found is None or (found[1] is None and found[2] != "-"):
                raise AnnotationError(f"cannot parse spec {text!r}: {word!r} is no word; {_FORM}.")
            if found[1] is None:
                others = True
            else:
                dims.append((int(found[1]), () if found[2] == "-" else tuple(found[2].split("*"))))
        return cls(tuple(dims), others)
