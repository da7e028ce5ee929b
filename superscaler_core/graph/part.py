"""Part: a piece of an op's work on one device; its boxes and code follow from its loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.graph.form import PartForm, Piece
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import VTensor

__all__ = ["Part", "Piece"]


@dataclass(frozen=True)
class Part:
    """A part of an op: the iterations ``pieces``; loops that are not listed there are whole.

    Laws (tests/superscaler_core/plan/test_op_trans.py, models/test_models.py): the boxes and
    partial sums of a part are those of its iterations; parts whose iterations tile those of the op
    write every partial sum of every element once.

    Attributes:
        op: the op.
        pieces: sorted by identifier.
        replica: its number among parts with the same pieces, which do the same work.
    """

    op: Op
    pieces: tuple[Piece, ...] = ()
    replica: int = 0

    @cached_property
    def form(self) -> PartForm:
        """The part's form, which equal pieces of ops of the same form share."""
        return self.op.form.part(self.pieces)

    def range(self, identifier: str) -> tuple[int, int]:
        """Iterations of a loop, ``[lo, hi)``."""
        return self.form.ranges.get(identifier) or (0, self.op.sizes[identifier])

    @cached_property
    def inputs(self) -> tuple[VTensor, ...]:
        """The boxes that the part reads, and which partial sums of their gradients it computes."""
        pairs = zip(self.op.inputs, self.form.inputs, strict=True)
        return tuple(VTensor(tensor, *view) for tensor, view in pairs)

    @cached_property
    def outputs(self) -> tuple[VTensor, ...]:
        """The boxes that the part writes."""
        pairs = zip(self.op.outputs, self.form.outputs, strict=True)
        return tuple(VTensor(tensor, *view) for tensor, view in pairs)

    def call(self, names: Sequence[str], seed: str = "0", bias: str | None = None) -> str:
        """The expression that computes its outputs, given the expressions of its inputs.

        A product may also be given a bias, as an argument of its call.
        """
        given = {f"x{i}": name for i, name in enumerate(names)} | {"seed": seed}
        pieces = self.form.call
        if bias is not None:
            given, pieces = given | {"bias": bias}, self.form.call_with_bias
        return "".join(given[piece] if i % 2 else piece for i, piece in enumerate(pieces))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.op.index, self.pieces, self.replica))

    def __str__(self) -> str:
        pieces = ", ".join(f"{i}[{lo}:{hi}]" for i, lo, hi in self.pieces)
        copy = f" copy {self.replica}" if self.replica else ""
        return self.op.name + (f" {pieces}" if pieces else "") + copy
