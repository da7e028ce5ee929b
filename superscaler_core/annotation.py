"""Annotation: how the dims of an op's tensors relate, such as ``m k+, k+ n -> m n``.

An identifier is one loop of the op. It is *spatial* if every output has it, so that pieces of it
make pieces of the outputs; a *reduction*, marked ``+``, if pieces of it make summands; and *fixed*,
marked ``^``, if it cannot be cut. ``(h d)`` is one dim made of two loops, the outer first; ``1`` is
a dim of size 1; ``()`` is a scalar. The form follows nnScaler's dimops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import rvdcomm as rv
from superscaler_core.errors import AnnotationError

Dim = tuple[str, ...]
"""The identifiers of one dim, outermost first; ``()`` for a dim of size 1."""

Operand = tuple[Dim, ...]

Ranges = Mapping[str, tuple[int, int]]
"""Half-open ranges of identifiers, in iterations; one that is missing is whole."""

_TOKEN = re.compile(r"\s*(\(|\)|->|,|[A-Za-z_][A-Za-z0-9_.]*[+^]?|1)")


@dataclass(frozen=True)
class Annotation:
    """Operands of an op by the loops that index them, in canonical form.

    Laws (tests/superscaler_core/test_annotation.py): ``Annotation.parse(str(x)) == x``; the boxes
    of an operand, over ranges that tile its loops, tile the operand.

    >>> matmul = Annotation.parse("m k+, k n -> m n")
    >>> str(matmul), matmul.reductions
    ('m k+, k+ n -> m n', ('k',))
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    fixed: frozenset[str]

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """All identifiers, in the order in which they are first written."""
        found = dict.fromkeys(i for operand in self.operands for dim in operand for i in dim)
        return tuple(found)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """Identifiers that some output lacks: pieces of them make summands of it."""
        lacking = {i for out in self.outputs for i in self.ids if i not in _ids_of(out)}
        return tuple(i for i in self.ids if i in lacking and i not in self.fixed)

    def is_splittable(self, identifier: str, sizes: Mapping[str, int]) -> bool:
        """Whether a loop can be cut: it is not fixed, and outermost in every dim that it is in."""
        return identifier not in self.fixed and all(
            all(sizes[outer] == 1 for outer in dim[: dim.index(identifier)])
            for operand in self.operands
            for dim in operand
            if identifier in dim
        )

    def sizes(
        self,
        inputs: Sequence[tuple[int, ...]],
        outputs: Sequence[tuple[int, ...]],
        known: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """The size of every identifier, from the shapes of the tensors, in elements.

        Args:
            inputs, outputs: shapes.
            known: sizes that the shapes do not say, such as of ``g`` in ``(g c)``.

        Raises:
            AnnotationError: the shapes do not fit, or do not say how large an identifier is.
        """
        shapes = (*inputs, *outputs)
        self._check_ranks(shapes, len(inputs))
        sizes = dict(known or {})
        dims = [
            (dim, size)
            for operand, shape in zip(self.operands, shapes, strict=True)
            for dim, size in zip(operand, shape, strict=True)
        ]
        # A dim of several identifiers says how large the last unknown one is: few rounds do.
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
        return sizes

    def box(self, operand: Operand, ranges: Ranges, sizes: Mapping[str, int]) -> rv.Box:
        """What of an operand the iterations in ``ranges`` touch.

        Raises:
            AnnotationError: the region is not one box: an inner loop of a dim is cut.
        """
        bounds = [_bounds(dim, ranges, sizes, self) for dim in operand]
        return rv.Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))

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
        if not operand:
            return "()"
        words = []
        for dim in operand:
            marked = [i + self._mark(i) for i in dim]
            words.append(
                "1" if not dim else marked[0] if len(dim) == 1 else f"({' '.join(marked)})"
            )
        return " ".join(words)

    def _mark(self, identifier: str) -> str:
        return "^" if identifier in self.fixed else "+" if identifier in self.reductions else ""

    def __str__(self) -> str:
        sides = (", ".join(map(self._text, side)) for side in (self.inputs, self.outputs))
        return " -> ".join(sides).strip()

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Read the text that ``str`` writes; a mark may be left out after it was given once.

        Raises:
            AnnotationError: the text is malformed, or a loop that an output lacks has no mark.
        """
        sides: list[list[Operand]] = [[]]
        marks: dict[str, set[str]] = {}
        for operand, ends_side in _operands(text):
            for dim in operand:
                for word in dim:
                    marks.setdefault(word.rstrip("+^"), set()).update(
                        word[len(word.rstrip("+^")) :]
                    )
            sides[-1].append(tuple(tuple(w.rstrip("+^") for w in dim) for dim in operand))
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


def _operands(text: str) -> Iterator[tuple[tuple[Dim, ...], bool]]:
    """Every operand with its marks, and whether ``->`` follows it."""
    dims: list[Dim] = []
    inner: list[str] | None = None
    at, any_word = 0, False
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise AnnotationError(
                f"cannot parse annotation {text!r}: unexpected {text[at:].strip()[:1]!r} at column "
                f"{len(text) - len(text[at:].lstrip()) + 1}."
            )
        token, at = found[1], found.end()
        if token in (",", "->"):
            if inner is not None:
                raise AnnotationError(f"cannot parse annotation {text!r}: '(' is not closed.")
            if any_word or token == ",":
                yield tuple(dims), token == "->"
            elif token == "->":  # no inputs at all: an op that makes a tensor of nothing
                raise AnnotationError(f"cannot parse annotation {text!r}: no input before '->'.")
            dims, any_word = [], False
            continue
        any_word = True
        if token == "(":
            inner = []
        elif token == ")":
            if inner is None:
                raise AnnotationError(f"cannot parse annotation {text!r}: ')' without '('.")
            if inner:
                dims.append(tuple(inner))
            inner = None
        elif inner is not None:
            inner += [token] if token != "1" else []
        else:
            dims.append((token,) if token != "1" else ())
    if inner is not None:
        raise AnnotationError(f"cannot parse annotation {text!r}: '(' is not closed.")
    yield tuple(dims), False


def _bounds(
    dim: Dim, ranges: Ranges, sizes: Mapping[str, int], annotation: Annotation
) -> tuple[int, int]:
    """The run of indices of one dim: outer loops stand still, then one is cut, the rest whole."""
    lo, extent, is_cut = 0, 1, False
    for identifier in dim:
        size = sizes[identifier]
        start, stop = ranges.get(identifier, (0, size))
        if is_cut and (start, stop) != (0, size):
            raise AnnotationError(
                f"{annotation}: ({' '.join(dim)}) cannot be cut along its inner {identifier} to "
                f"[{start}, {stop}); only the outermost can."
            )
        lo, extent = lo * size + start, extent * (stop - start)
        # Of a loop with several iterations here, all loops inside must be whole.
        is_cut = is_cut or stop - start != 1
    return lo, lo + extent


def _ids_of(operand: Operand) -> frozenset[str]:
    return frozenset(i for dim in operand for i in dim)


def _shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
