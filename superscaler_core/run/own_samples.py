"""Own samples: the part of an input that a rank holds, where no rank holds the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import rvdcomm as rv


@dataclass(frozen=True, eq=False)
class OwnSamples:
    """A box of an input of a step, whose samples are numbered ``[microbatch, sample]``.

    Attributes:
        tensor: the box; the input's dim of samples is two dims, microbatches and samples.
        box: where it is in all samples of the step.
        dim: the dim of the microbatches.
    """

    tensor: Tensor
    box: rv.Box
    dim: int

    def of(self, microbatch: int, box: rv.Box) -> Tensor:
        """A box of a microbatch's input."""
        lo = (*self.box.lo[: self.dim], *self.box.lo[self.dim + 1 :])
        at = tuple(
            slice(start - base, stop - base)
            for start, stop, base in zip(box.lo, box.hi, lo, strict=True)
        )
        return self.tensor.select(self.dim, microbatch)[at]
