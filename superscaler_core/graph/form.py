"""Form: a key that is equal for ops that compute the same on tensors of equal shapes.

Results that depend only on it (boxes of parts, costs) are computed once for the layers of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import rvdcomm as rv
from superscaler_core.graph.annotation import Annotation, Operand, tiling_loops
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.tensor import PARAMETER, Summand

Piece = tuple[str, int, int]
"""Iterations ``[lo, hi)`` of one loop."""

MAX_FORMS = 1 << 12
"""Bound on cached forms. A model has tens of them: ops of equal kind and shape share one."""

MAX_PART_FORMS = 1 << 16
"""Bound on cached pieces of ops: tens of forms, with hundreds of ways to cut each."""


_CUT = "\0"
"""Delimits names in the text of a call; no code contains it."""


class TensorForm(NamedTuple):
    """A tensor without its name; the attributes are those of ``PTensor``."""

    shape: tuple[int, ...]
    dtype: str
    kind: str
    requires_grad: bool


@dataclass(frozen=True)
class OpForm:
    """An op without its name, position and tensors; the attributes are those of ``Op``.

    Laws (tests/superscaler_core/graph/test_form.py): equal layers of a model have equal forms;
    equal forms are one object while they are cached.
    """

    kind: str
    annotation: Annotation
    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    computes: str | Invocation
    saves: tuple[int, ...]
    flops: float

    @classmethod
    def of(cls, *fields: Any) -> OpForm:
        """The form with these attributes, in the order of the fields; equal forms are shared."""
        return _interned(cls(*fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return OpForm.of, tuple(getattr(self, each.name) for each in fields(self))

    def part(self, pieces: tuple[Piece, ...]) -> PartForm:
        """The form of a part with these pieces."""
        return _part_form(self, pieces)

    @cached_property
    def sizes_of(self) -> Mapping[str, int]:
        """Iterations of every loop."""
        return dict(self.sizes)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The positions of inputs that are trained parameters."""
        pairs = enumerate(self.inputs)
        return tuple(i for i, form in pairs if form.kind == PARAMETER and form.requires_grad)

    @cached_property
    def uncut(self) -> frozenset[str]:
        """The loops that cannot be cut."""
        loops = self.sizes_of
        return frozenset(i for i in loops if not self.annotation.is_splittable(i, loops))

    @cached_property
    def says_where(self) -> bool:
        """Whether the call of a part depends on the part's position, not only on its sizes."""
        code = str(self.computes)
        return any(field in code for field in (".lo", ".hi", "{start", "{pad"))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.sizes, self.inputs, self.outputs, self.computes, self.saves))


@lru_cache(maxsize=MAX_FORMS)
def _interned(form: OpForm) -> OpForm:
    return form


@dataclass(frozen=True)
class PartForm:
    """The form of a part: the form of its op, its pieces, and values derived from these."""

    op: OpForm
    pieces: tuple[Piece, ...]

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The pieces by identifier."""
        return {i: (lo, hi) for i, lo, hi in self.pieces}

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Iterations of every loop."""
        pairs = (self.ranges.get(i, (0, size)) for i, size in self.op.sizes)
        return tuple(hi - lo for lo, hi in pairs)

    @cached_property
    def volume(self) -> int:
        """Iterations of all loops together."""
        return prod(self.extents)

    @cached_property
    def inputs(self) -> tuple[tuple[rv.Box, Summand], ...]:
        """For each input, the box read, and which partial sum of its gradient is computed."""
        return self._views(self.op.annotation.inputs, self.op.inputs)

    @cached_property
    def outputs(self) -> tuple[tuple[rv.Box, Summand], ...]:
        """For each output, the box written, and which partial sum of it is computed."""
        return self._views(self.op.annotation.outputs, self.op.outputs)

    @cached_property
    def overhangs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Elements by which windows reach over both ends of each dim, for each input."""
        op = self.op
        return tuple(
            op.annotation.overhang(operand, self.ranges, op.sizes_of, form.shape)
            for operand, form in zip(op.annotation.inputs, op.inputs, strict=True)
        )

    @cached_property
    def call(self) -> tuple[str, ...]:
        """The expression for the outputs, split at the names of operands and of the seed.

        Every second element is one of these names: ``x0``, ``x1``, ... or ``seed``.
        """
        return self._cut(self.op.computes)

    @cached_property
    def call_with_bias(self) -> tuple[str, ...]:
        """As ``call``, for a call that also takes a bias; ``bias`` is a further name."""
        assert isinstance(self.op.computes, Invocation), "others take no argument more"
        return self._cut(self.op.computes.adding("bias", "{bias}"))

    def _cut(self, code: str | Invocation) -> tuple[str, ...]:
        op = self.op
        names = [*(f"x{i}" for i in range(len(op.inputs))), "seed", "bias"]
        given: dict[str, object] = {name: f"{_CUT}{name}{_CUT}" for name in names}
        given |= {f"in{i}": box for i, (box, _) in enumerate(self.inputs)}
        given |= {f"out{i}": box for i, (box, _) in enumerate(self.outputs)}
        given |= {f"pad{i}": pad for i, pad in enumerate(self.overhangs)}
        loops = [i for i, _ in op.sizes]
        given["size"] = dict(zip(loops, self.extents, strict=True))
        given["start"] = {i: self.ranges[i][0] if i in self.ranges else 0 for i in loops}
        return tuple(str(code).format(**given).split(_CUT))

    def _views(
        self, operands: tuple[Operand, ...], forms: tuple[TensorForm, ...]
    ) -> tuple[tuple[rv.Box, Summand], ...]:
        op, found = self.op, []
        for operand, form in zip(operands, forms, strict=True):
            box = op.annotation.box(operand, self.ranges, op.sizes_of, form.shape)
            # Where windows overlap, the parts compute partial sums of one gradient.
            tiling = tiling_loops(operand)
            found.append((box, tuple(p for p in self.pieces if p[0] not in tiling)))
        return tuple(found)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.pieces))


_part_form = lru_cache(maxsize=MAX_PART_FORMS)(PartForm)
