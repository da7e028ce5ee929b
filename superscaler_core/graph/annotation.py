"""Annotation: how the dims of an op's tensors relate, such as ``m k+, k+ n -> m n``.

An identifier names one loop of the op. A *spatial* loop is in every output: a piece of the loop
computes a piece of the outputs. A *reduction*, marked ``+``, is missing in some output: a piece of
the loop computes a partial sum (a summand). A *fixed* loop, marked ``^``, cannot be cut.

``(h d)`` is one dim made of two loops, the outer first; ``1`` is a dim of size 1; ``()`` is a
scalar. ``y*2-1+1`` is a dim of an input that is read through a window that slides along the loop
``y``. The reads of several parts overlap, and each part computes a partial sum of the input's
gradient. The form follows nnScaler's dimops, which have no windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import prod

import rvdcomm as rv
from superscaler_core.errors import AnnotationError
from superscaler_core.graph.annotation_text import Dim, Loops, operands_of
from superscaler_core.graph.sliding import SlidingWindow

Operand = tuple[Dim, ...]

Ranges = Mapping[str, tuple[int, int]]
"""A half-open range of iterations for each identifier; a missing identifier is whole."""


@dataclass(frozen=True)
class Annotation:
    """The operands of an op, each given by the loops that index it, in canonical form.

    Laws (tests/superscaler_core/graph/test_annotation.py): ``Annotation.parse(str(x)) == x``; the
    boxes of an operand, over ranges that tile its loops, tile the operand, or cover it where
    windows overlap.

    >>> matmul = Annotation.parse("m k+, k n -> m n")
    >>> str(matmul), matmul.reductions
    ('m k+, k+ n -> m n', ('k',))
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    fixed: frozenset[str]

    def __post_init__(self) -> None:
        for window in _windows(self.operands):
            everywhere = all(window.loop in loops_of(out) for out in self.outputs)
            if window.loop in self.fixed or not everywhere or any(_windows(self.outputs)):
                raise AnnotationError(
                    f"{self}: the window {window} has to be of an input, and to slide along a loop "
                    "that all outputs have and that can be cut."
                )

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """All identifiers, in the order of their first occurrence."""
        return tuple(dict.fromkeys(i for o in self.operands for dim in o for i in _loops(dim)))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """Identifiers that some output lacks; pieces of these loops compute partial sums of it."""
        everywhere = frozenset(self.ids).intersection(*map(loops_of, self.outputs))
        return tuple(i for i in self.ids if i not in everywhere and i not in self.fixed)

    def is_splittable(self, identifier: str, sizes: Mapping[str, int]) -> bool:
        """Whether a loop can be cut: it is not fixed, and it is outermost in each of its dims."""
        return identifier not in self.fixed and all(
            all(sizes[outer] == 1 for outer in loops[: loops.index(identifier)])
            for operand in self.operands
            for loops in map(_loops, operand)
            if identifier in loops
        )

    def sizes(
        self,
        inputs: Sequence[tuple[int, ...]],
        outputs: Sequence[tuple[int, ...]],
        known: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """The size of every identifier, from the shapes of the tensors, in elements.

        Args:
            inputs, outputs: the shapes of the tensors.
            known: sizes that the shapes do not determine, such as of ``g`` in ``(g c)``.

        Raises:
            AnnotationError: the shapes do not fit, or do not determine an identifier's size.
        """
        shapes = (*inputs, *outputs)
        self._check_ranks(shapes, len(inputs))
        sizes = dict(known or {})
        pairs = (zip(*each, strict=True) for each in zip(self.operands, shapes, strict=True))
        every: list[tuple[Dim, int]] = [*chain.from_iterable(pairs)]
        dims = [(dim, size) for dim, size in every if not isinstance(dim, SlidingWindow)]
        # A dim determines its only unknown identifier, so a few rounds suffice.
        progress = True
        while progress:
            progress = False
            for dim, size in dims:
                unknown = [i for i in dim if i not in sizes]
                found = prod(sizes[i] for i in dim if i in sizes)
                if len(unknown) == 1 and found and size % found == 0:
                    sizes[unknown[0]] = size // found
                    progress = True
        for dim, size in dims:
            unknown = [i for i in dim if i not in sizes]
            if unknown:
                raise AnnotationError(
                    f"{self}: shapes {_shapes_text(shapes)} do not say how large "
                    f"{', '.join(unknown)} is in ({' '.join(dim)}) of size {size}."
                )
            if prod(sizes[i] for i in dim) != size:
                known_text = " * ".join(f"{i}={sizes[i]}" for i in dim) or "1"
                raise AnnotationError(
                    f"{self} does not fit shapes {_shapes_text(shapes)}: a dim of size {size} "
                    f"should be {known_text}."
                )
        for each, size in every:
            if isinstance(each, SlidingWindow) and not each.fits(sizes[each.loop], size):
                raise AnnotationError(
                    f"{self} does not fit shapes {_shapes_text(shapes)}: {sizes[each.loop]} "
                    f"windows {each} do not fit a dim of size {size}; the last one has to begin "
                    "in it, and one more must not end in it."
                )
        return sizes

    def box(
        self,
        operand: Operand,
        ranges: Ranges,
        sizes: Mapping[str, int],
        shape: Sequence[int] | None = None,
    ) -> rv.Box:
        """The box of an operand that the iterations in ``ranges`` touch.

        Args:
            operand: an operand of this annotation.
            ranges: the iterations of each loop.
            sizes: sizes of all identifiers.
            shape: shape of the operand's tensor; needed only for windows.

        Raises:
            AnnotationError: the region is not one box: an inner loop of a dim is cut.
        """
        bounds = []
        for i, dim in enumerate(operand):
            if isinstance(dim, SlidingWindow):
                assert shape is not None, f"{self}: {dim} ends where its tensor does"
                start, stop = ranges.get(dim.loop, (0, sizes[dim.loop]))
                bounds.append(dim.reads(start, stop, of=sizes[dim.loop], size=shape[i]))
            else:
                bounds.append(self._bounds(dim, ranges, sizes))
        return rv.Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))

    def _bounds(self, dim: Loops, ranges: Ranges, sizes: Mapping[str, int]) -> tuple[int, int]:
        """The index range of one dim."""
        lo, extent, is_cut = 0, 1, False
        for identifier in dim:
            size = sizes[identifier]
            start, stop = ranges.get(identifier, (0, size))
            if is_cut and (start, stop) != (0, size):
                raise AnnotationError(
                    f"{self}: ({' '.join(dim)}) cannot be cut along its inner {identifier} to "
                    f"[{start}, {stop}); only the outermost can."
                )
            lo, extent = lo * size + start, extent * (stop - start)
            # If a loop has several iterations here, all loops inside it must be whole.
            is_cut = is_cut or stop - start != 1
        return lo, lo + extent

    def overhang(
        self, operand: Operand, ranges: Ranges, sizes: Mapping[str, int], shape: Sequence[int]
    ) -> tuple[tuple[int, int], ...]:
        """Elements by which windows reach over both ends of every dim; an op must pad them."""
        return tuple(
            dim.overhang(*ranges.get(dim.loop, (0, sizes[dim.loop])), size=size)
            if isinstance(dim, SlidingWindow)
            else (0, 0)
            for dim, size in zip(operand, shape, strict=True)
        )

    def _check_ranks(self, shapes: Sequence[tuple[int, ...]], num_inputs: int) -> None:
        if (num_inputs, len(shapes)) != (len(self.inputs), len(self.operands)):
            raise AnnotationError(
                f"{self} is of {len(self.inputs)} inputs and {len(self.outputs)} outputs, but "
                f"{num_inputs} and {len(shapes) - num_inputs} were given."
            )
        for operand, shape in zip(self.operands, shapes, strict=True):
            if len(operand) != len(shape):
                raise AnnotationError(
                    f"{self}: '{self._text(operand)}' has {len(operand)} dims, its tensor has "
                    f"shape {shape}."
                )

    def _text(self, operand: Operand) -> str:
        words = []
        for dim in operand:
            if isinstance(dim, SlidingWindow):
                words.append(str(dim))
                continue
            marked = " ".join(i + self._mark(i) for i in dim) or "1"
            words.append(f"({marked})" if len(dim) > 1 else marked)
        return " ".join(words) or "()"

    def _mark(self, identifier: str) -> str:
        return "^" if identifier in self.fixed else "+" if identifier in self.reductions else ""

    def __str__(self) -> str:
        sides = (", ".join(map(self._text, side)) for side in (self.inputs, self.outputs))
        return " -> ".join(sides).strip()

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Read the text that ``str`` writes; a mark is needed only once per identifier.

        Raises:
            AnnotationError: the text is malformed, or a loop that an output lacks has no mark.
        """
        sides: list[list[Operand]] = [[]]
        marks: dict[str, set[str]] = {}
        for operand, ends_side in operands_of(text):
            for word in (word for dim in operand for word in _loops(dim)):
                name = word.rstrip("+^")
                marks.setdefault(name, set()).update(word[len(name) :])
            sides[-1].append(tuple(map(_unmarked, operand)))
            if ends_side:
                sides.append([])
        if len(sides) != 2:
            raise AnnotationError(f"cannot parse annotation {text!r}: expected one '->'.")
        fixed = frozenset(i for i, given in marks.items() if "^" in given)
        made = cls(tuple(sides[0]), tuple(sides[1]), fixed)
        _check_marks(made, marks, text)
        return made


def _check_marks(made: Annotation, marks: Mapping[str, set[str]], text: str) -> None:
    for identifier, given in marks.items():
        if identifier in made.reductions and not given:
            raise AnnotationError(
                f"annotation {text!r}: some output lacks {identifier}; write '{identifier}+' if "
                f"parts of it add up, '{identifier}^' if it cannot be split."
            )
        if "+" in given and identifier not in made.reductions:
            raise AnnotationError(
                f"annotation {text!r}: '{identifier}+' marks a sum over {identifier}, but "
                + ("it is marked '^' too." if "^" in given else "every output has it.")
            )


@cache
def tiling_loops(operand: Operand) -> frozenset[str]:
    """The loops whose pieces touch disjoint indices of an operand: all but overlapping windows."""
    windows = _windows((operand,))
    return loops_of(operand) | {window.loop for window in windows if not window.overlap}


@cache
def loops_of(operand: Operand) -> frozenset[str]:
    """The loops that index an operand, without those of its windows."""
    return frozenset(i for dim in operand for i in _loops(dim))


def _loops(dim: Dim) -> Loops:
    """The loops that index a dim; none for a window, whose loop indexes other operands."""
    return () if isinstance(dim, SlidingWindow) else dim


def _unmarked(dim: Dim) -> Dim:
    return dim if isinstance(dim, SlidingWindow) else tuple(word.rstrip("+^") for word in dim)


def _windows(operands: Sequence[Operand]) -> list[SlidingWindow]:
    return [dim for operand in operands for dim in operand if isinstance(dim, SlidingWindow)]


def _shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
