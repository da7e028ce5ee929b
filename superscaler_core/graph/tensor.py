"""PTensor: a tensor of the model. VTensor: one op's view of it, a box and a summand."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import rvdcomm as rv

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype."""

INPUT, PARAMETER, CONSTANT, ACTIVATION = "input", "parameter", "constant", "activation"


@dataclass(frozen=True, slots=True)
class PTensor:
    """A tensor of the single-device model; the plan never changes it.

    Attributes:
        name: unique in its graph; of a parameter, as in the model's ``state_dict``.
        shape: sizes, in elements; of one microbatch if it depends on the batch.
        dtype: name of the element type.
        kind: "input", "parameter", "constant" or "activation".
        requires_grad: whether the loss has a gradient with respect to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    requires_grad: bool

    @property
    def box(self) -> rv.Box:
        """The box of the whole tensor."""
        return rv.Box.of_shape(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __hash__(self) -> int:
        # Names are unique in a graph, and tensors are keys of most tables.
        return hash(self.name)

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"


Summand = tuple[tuple[str, int, int], ...]
"""Which partial sum a part computes: a piece ``(identifier, lo, hi)`` of each summed loop."""


@dataclass(frozen=True, slots=True)
class VTensor:
    """A vTensor: the box of a pTensor that a part of an op reads or writes (the paper's mask).

    Attributes:
        tensor: the pTensor.
        box: a region of the pTensor.
        summand: for a write, the part's share of the sum over the reduction loops; for a read, the
            part's share of the gradient. ``()`` is the whole sum.
    """

    tensor: PTensor
    box: rv.Box
    summand: Summand

    def __str__(self) -> str:
        shares = "".join(f" sum over {i}[{lo}:{hi}]" for i, lo, hi in self.summand)
        return f"{self.tensor.name}{self.box}{shares}"
