"""Part: a piece of an op's work, which one device does; masks and code follow from its loops."""

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
    """The iterations ``pieces`` of an op, all of every loop that is not named there.

    Laws (tests/superscaler_core/plan/test_op_trans.py, models/test_models.py): the boxes and
    summands of a part are those of its iterations; parts whose iterations tile the op's write every
    element once, with every summand.

    Attributes:
        op: what it is a part of.
        pieces: sorted by identifier.
        replica: parts with the same pieces do the same work; this tells them apart.
    """

    op: Op
    pieces: tuple[Piece, ...] = ()
    replica: int = 0

    @cached_property
    def form(self) -> PartForm:
        """What it has in common with the same pieces of ops of the same form."""
        return self.op.form.part(self.pieces)

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The pieces by identifier."""
        return self.form.ranges

    def range(self, identifier: str) -> tuple[int, int]:
        """Iterations of a loop, ``[lo, hi)``."""
        return self.form.ranges.get(identifier) or (0, self.op.sizes[identifier])

    @cached_property
    def inputs(self) -> tuple[VTensor, ...]:
        """What it reads; the summand is of the gradient that it gives back."""
        pairs = zip(self.op.inputs, self.form.inputs, strict=True)
        return tuple(VTensor(tensor, *view) for tensor, view in pairs)

    @cached_property
    def outputs(self) -> tuple[VTensor, ...]:
        """What it writes."""
        pairs = zip(self.op.outputs, self.form.outputs, strict=True)
        return tuple(VTensor(tensor, *view) for tensor, view in pairs)

    @property
    def volume(self) -> int:
        """Iterations of all loops together."""
        return self.form.volume

    def call(self, names: Sequence[str], seed: str = "0", bias: str | None = None) -> str:
        """The expression that computes its outputs, given the expressions of its inputs.

        Of a product it may be given a bias too, which is an argument of its call then.
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
