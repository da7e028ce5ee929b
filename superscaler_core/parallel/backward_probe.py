"""Backward probe: whether the backward of an op that no rule knows computes each sample alone.

A ``torch.autograd.Function`` may go forward sample by sample, and divide gradients by their norm
over the batch, or by the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.parallel.extent import BatchExtent
from superscaler_core.parallel.probe import changed_sample, value_for
from superscaler_core.run.evaluate import run_part

REL = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Differences of sums in another order, by dtype."""


def backward_fault(
    op: Op,
    twin: Op,
    extents: Sequence[BatchExtent],
    results: Sequence[BatchExtent],
    num: int,
    values: Mapping[str, Tensor],
) -> str:
    """What is wrong with an op's backward, for microbatches; "" if nothing is, or it has none.

    Args:
        op, twin: the op of ``num`` samples, and of half of them.
        extents, results: those of its inputs, as ``probed`` takes them, and of its results.
        num, values: as of ``probed``.
    """
    random = torch.Generator().manual_seed(op.index)
    given = [value_for(tensor, values, random) for tensor in op.inputs]
    grads = [torch.randn(t.shape, generator=random, dtype=torch.float64) for t in op.outputs]
    run = _Backward(op, extents, results, num)
    try:
        before, one, other = run(given, grads), run(given, grads, 0), run(given, grads, num - 1)
        both = run(given, grads, 0, num - 1)
        mine, back = (
            [_first_half(x, of, num) if of.is_rows else x for x, of in zip(xs, ofs, strict=True)]
            for xs, ofs in ((given, extents), (grads, results))
        )
        half = _Backward(twin, extents, results, num // 2)(mine, back)
    except Exception:  # no backward, or none of random numbers
        return ""
    for extent, a, b, c, d, h in zip(extents, before, one, other, both, half, strict=True):
        if a is None or b is None or c is None or d is None:
            continue
        if not extent.is_rows:
            # A sum over samples: what one sample adds does not depend on another.
            if not _close(a - b, c - d):
                return f"{op.name} computes gradients of several samples together"
            continue
        if not _is_alone(a, b, extent, 0, num) or not _is_alone(a, c, extent, num - 1, num):
            return f"{op.name} computes gradients of several samples together"
        if h is not None and not _close(_first_half(a, extent, num), h):
            return f"{op.name} computes gradients with the number of samples"
    return ""


@dataclass(frozen=True)
class _Backward:
    """The gradients of an op's inputs, given those of its results; arguments as above."""

    op: Op
    extents: Sequence[BatchExtent]
    results: Sequence[BatchExtent]
    num: int

    def __call__(
        self, given: Sequence[Tensor], grads: Sequence[Tensor], *samples: int
    ) -> list[Tensor | None]:
        """The gradients, after a change of some samples and of the gradients of their results."""
        for sample in samples:
            given = changed_sample(given, self.extents, sample, self.num)
            grads = changed_sample(grads, self.results, sample, self.num)
        leaves = [x.detach().clone() for x in given]
        learned = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        # A function may write in place into a computed tensor, but not into a leaf.
        found = run_part(Part(self.op), [x * 1 if x.requires_grad else x for x in leaves])
        pairs = [(y, g.to(y.dtype)) for y, g in zip(found, grads, strict=True) if y.requires_grad]
        roots, weights = zip(*pairs, strict=True)
        made = iter(torch.autograd.grad(roots, learned, weights, allow_unused=True))
        return [next(made) if x.is_floating_point() else None for x in given]


def _first_half(tensor: Tensor, extent: BatchExtent, num: int) -> Tensor:
    size = tensor.shape[extent.dim]
    at = [i for i in range(size) if extent.place.sample_of(i, num) < num // 2]
    return tensor.index_select(extent.dim, torch.tensor(at))


def _is_alone(before: Tensor, after: Tensor, extent: BatchExtent, sample: int, num: int) -> bool:
    """Whether a change of one sample has changed no other sample's gradient."""
    size = before.shape[extent.dim]
    rest = [i for i in range(size) if extent.place.sample_of(i, num) != sample]
    at = torch.tensor(rest, dtype=torch.int64)
    return _close(before.index_select(extent.dim, at), after.index_select(extent.dim, at))


def _close(a: Tensor, b: Tensor) -> bool:
    rel = REL.get(a.dtype, 1e-3)
    return a.shape != b.shape or torch.allclose(a, b, rel, rel, equal_nan=True)
