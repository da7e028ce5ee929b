"""Probe: which rows of an op's results depend on which sample, found by changing one sample.

For ops without a rule, and those that keep the dim of samples whole, as ``torch.cat`` along it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.parallel.extent import SAME, BatchExtent, Kind, Place, mixed
from superscaler_core.run.evaluate import run_part

MAX_TRIED = 4
"""Number of samples that are changed, the first and the last among them."""


def probed(
    op: Op, extents: Sequence[BatchExtent], num: int, values: Mapping[str, Tensor]
) -> list[BatchExtent]:
    """The extents of results of an op of ``num`` samples, found by running it on random numbers.

    The extents of its inputs are Rows and Same, of degree 0; ``values`` are those of constants.
    """
    random = torch.Generator().manual_seed(op.index)
    inputs = [value_for(t, values, random) for t in op.inputs]
    try:
        changed = _changes(op, inputs, extents, num)
    except Exception as error:
        why = (
            f"{op.name} has no rule that says which samples its results depend on, and cannot be "
            f"run on random numbers ({type(error).__name__})"
        )
        return [mixed(why)] * len(op.outputs)
    # A change of one sample leaves a maximum of random numbers as it was, but not that of equal
    # ones; a minimum, `any` and `all` likewise.
    for number in (0, 1):
        with suppress(Exception):
            pairs = zip(inputs, extents, strict=True)
            equal = [torch.full_like(x, number) if of.is_rows else x for x, of in pairs]
            more = _changes(op, equal, extents, num)
            changed = [{k: a[k] | b[k] for k in a} for a, b in zip(changed, more, strict=True)]
    return [_extent(op, masks, num) for masks in changed]


def _changes(
    op: Op, inputs: Sequence[Tensor], extents: Sequence[BatchExtent], num: int
) -> list[dict[int, Tensor]]:
    """For every result, which of its elements a change of a sample changes, by the sample."""
    tried = sorted({0, num - 1, *range(1, num - 1, max(1, num // (MAX_TRIED - 1)))})
    before = _run(op, inputs)
    found: list[dict[int, Tensor]] = [{} for _ in before]
    for sample in tried:
        after = _run(op, changed_sample(inputs, extents, sample, num))
        for masks, x, y in zip(found, before, after, strict=True):
            masks[sample] = (y != x) & ~(y.isnan() & x.isnan())
    return found


def _run(op: Op, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return run_part(Part(op), [x.clone() for x in inputs])


def value_for(tensor: PTensor, values: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
    """A value of an op's input: that of a constant, or random numbers."""
    known = values.get(tensor.name)
    if known is not None and not known.is_meta:
        return known
    dtype = getattr(torch, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(dtype)
    return torch.randint(2, tensor.shape, generator=random).to(dtype)


def changed_sample(
    inputs: Sequence[Tensor], extents: Sequence[BatchExtent], sample: int, num: int
) -> list[Tensor]:
    """The inputs with another value of one sample."""
    made = []
    for x, extent in zip(inputs, extents, strict=True):
        if not extent.is_rows:
            made.append(x)
            continue
        at = [i for i in range(x.shape[extent.dim]) if extent.place.sample_of(i, num) == sample]
        rows = x.index_select(extent.dim, torch.tensor(at))
        is_number = x.is_floating_point() or x.is_complex()
        # Other for every number, below 1 and above 0 where all are equal.
        other = torch.where(rows == 1, 0, 2 * rows + 1) if is_number else 1 - rows.long()
        made.append(x.index_copy(extent.dim, torch.tensor(at), other.to(x.dtype)))
    return made


def _extent(op: Op, changed: Mapping[int, Tensor], num: int) -> BatchExtent:
    """The extent of a result, given which of its elements changes of samples change."""
    if not any(mask.any() for mask in changed.values()):
        return SAME
    shape = next(iter(changed.values())).shape
    for dim, size in enumerate(shape):
        others = [d for d in range(len(shape)) if d != dim]
        rows = {k: (m.any(dim=others) if others else m).tolist() for k, m in changed.items()}
        for inner in (i for i in range(1, size // num + 1) if size % (i * num) == 0):
            place = Place(size // (inner * num), inner)
            if all(
                place.sample_of(i, num) == k
                for k, mask in rows.items() for i, is_changed in enumerate(mask) if is_changed
            ):  # fmt: skip
                return BatchExtent(Kind.ROWS, dim=dim, place=place)
    return mixed(f"{op.name} computes results of several samples together")
