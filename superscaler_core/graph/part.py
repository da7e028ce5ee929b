"""Part: a piece of an op's work, which one device does; masks and code follow from its loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from superscaler_core.graph.annotation import Operand, tiling_loops
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor, VTensor

Piece = tuple[str, int, int]
"""Iterations ``[lo, hi)`` of one loop."""


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
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The pieces by identifier."""
        return {i: (lo, hi) for i, lo, hi in self.pieces}

    def range(self, identifier: str) -> tuple[int, int]:
        """Iterations of a loop, ``[lo, hi)``."""
        return self.ranges.get(identifier, (0, self.op.sizes[identifier]))

    @cached_property
    def inputs(self) -> tuple[VTensor, ...]:
        """What it reads; the summand is of the gradient that it gives back."""
        pairs = zip(self.op.inputs, self.op.annotation.inputs, strict=True)
        return tuple(self._view(tensor, operand) for tensor, operand in pairs)

    @cached_property
    def outputs(self) -> tuple[VTensor, ...]:
        """What it writes."""
        pairs = zip(self.op.outputs, self.op.annotation.outputs, strict=True)
        return tuple(self._view(tensor, operand) for tensor, operand in pairs)

    @property
    def overhangs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """How far its windows reach over the ends of every dim of every input."""
        op = self.op
        return tuple(
            op.annotation.overhang(operand, self.ranges, op.sizes, tensor.shape)
            for tensor, operand in zip(op.inputs, op.annotation.inputs, strict=True)
        )

    @property
    def volume(self) -> int:
        """Iterations of all loops together."""
        return prod(hi - lo for lo, hi in map(self.range, self.op.sizes))

    def call(self, names: Sequence[str], seed: str = "0") -> str:
        """The expression that computes its outputs, given the expressions of its inputs."""
        fields: dict[str, object] = {f"x{i}": name for i, name in enumerate(names)}
        fields |= {f"in{i}": view.box for i, view in enumerate(self.inputs)}
        fields |= {f"out{i}": view.box for i, view in enumerate(self.outputs)}
        fields |= {f"pad{i}": pad for i, pad in enumerate(self.overhangs)}
        ranges = {i: self.range(i) for i in self.op.sizes}
        fields["start"] = {i: lo for i, (lo, _) in ranges.items()}
        fields["size"] = {i: hi - lo for i, (lo, hi) in ranges.items()}
        return self.op.code.format(**fields, seed=seed)

    def _view(self, tensor: PTensor, operand: Operand) -> VTensor:
        box = self.op.annotation.box(operand, self.ranges, self.op.sizes, tensor.shape)
        # Where windows overlap, parts give back summands of one gradient.
        tiling = tiling_loops(operand)
        return VTensor(tensor, box, tuple(p for p in self.pieces if p[0] not in tiling))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.op.index, self.pieces, self.replica))

    def __str__(self) -> str:
        pieces = ", ".join(f"{i}[{lo}:{hi}]" for i, lo, hi in self.pieces)
        copy = f" copy {self.replica}" if self.replica else ""
        return self.op.name + (f" {pieces}" if pieces else "") + copy
