"""Coverage: the parts of every op together do all of its work, and no work is done twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from math import prod

import rvdcomm as rv
from superscaler_core.errors import CoverageError, PlanError
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part, Piece
from superscaler_core.plan.op_split import MAX_SPLITS, OpSplit
from superscaler_core.plan.plan import Plan


def check_assigned(plan: Plan) -> None:
    """Check that every part has a device.

    Raises:
        PlanError: some parts have no device; the message names the first of them.
    """
    ops = [op for op in _cut_ops(plan) if not plan.op_split(op).is_placed]
    missing = [part for op in ops for part in plan.parts(op) if plan.device(part) is None]
    if missing:
        names = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise PlanError(
            f"{len(missing)} parts have no device: {names}; call op_assign for each of them."
        )


def check_coverage(plan: Plan) -> None:
    """Check that the parts of every op tile its iterations.

    Then the parts that write a pTensor produce each of its elements exactly once, because the
    boxes and summands of an output follow from the iterations.

    Raises:
        CoverageError: two parts overlap, or no part covers some iterations; the message names both.
    """
    for op in _cut_ops(plan):
        fault = _fault(op.form, plan.op_split(op))
        if fault is not None:
            raise CoverageError(_message(op, plan.parts(op), fault))


def _cut_ops(plan: Plan) -> Iterator[Op]:
    """The ops of a plan, and the optimizer ops that the plan has cut or assigned."""
    yield from plan.graph.ops
    yield from filter(plan.has_parts, plan.graph.updates.values())


Fault = tuple[Sequence[Piece], Sequence[Piece] | None]
"""Either two pieces that overlap, or a region that no part computes and None."""


@lru_cache(maxsize=MAX_SPLITS)
def _fault(form: OpForm, split: OpSplit) -> Fault | None:
    """The fault in the pieces of a split, or None; repeated layers are checked once."""
    pieces = {part.pieces for part in split.parts}
    loops = tuple(sorted({i for mine in pieces for i, _, _ in mine}))
    sizes = tuple(form.sizes_of[i] for i in loops)
    boxes = {_box(loops, sizes, given): given for given in pieces}
    if _is_grid(sizes, list(boxes)):
        return None
    for (a, first), (b, second) in combinations(sorted(boxes.items()), 2):
        if a.overlaps(b):
            return first, second
    whole = rv.Box.of_shape(sizes)
    if sum(box.num_elements for box in boxes) == whole.num_elements:
        return None
    gap = _uncovered(whole, list(boxes))
    return tuple(zip(loops, gap.lo, gap.hi, strict=True)), None


def _box(loops: Sequence[str], sizes: Sequence[int], pieces: Sequence[Piece]) -> rv.Box:
    ranges = {i: (lo, hi) for i, lo, hi in pieces}
    bounds = [ranges.get(i, (0, size)) for i, size in zip(loops, sizes, strict=True)]
    return rv.Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))


def _is_grid(sizes: Sequence[int], boxes: Sequence[rv.Box]) -> bool:
    """Whether the boxes are all the cells of a grid over the whole, as for most splits."""
    count = 1
    for dim, size in enumerate(sizes):
        ranges = sorted({(box.lo[dim], box.hi[dim]) for box in boxes})
        if ranges[0][0] != 0 or ranges[-1][1] != size:
            return False
        if any(a[1] != b[0] for a, b in pairwise(ranges)):
            return False
        count *= len(ranges)
    return count == len(boxes)


def _uncovered(whole: rv.Box, boxes: Iterable[rv.Box]) -> rv.Box:
    """A region of ``whole`` outside all boxes; the caller knows that one exists."""
    left = [whole]
    for box in boxes:
        left = [rest for piece in left for rest in piece.subtract(box)]
    return max(left, key=lambda box: prod(box.shape))


def _message(op: Op, parts: Sequence[Part], fault: Fault) -> str:
    first, second = fault
    if second is None:
        missing = ", ".join(f"{i}[{lo}:{hi}]" for i, lo, hi in first)
        return (
            f"no part of {op.name} computes {missing} of {op.annotation}; its {len(parts)} parts "
            "have to tile all its iterations."
        )
    common = []
    others = {i: (lo, hi) for i, lo, hi in second}
    for i, lo, hi in first:
        start, stop = others.get(i, (0, op.sizes[i]))
        common.append(f"{i}[{max(lo, start)}:{min(hi, stop)}]")
    texts = [
        ", ".join(f"{i}[{lo}:{hi}]" for i, lo, hi in pieces) or "all of it"
        for pieces in (first, second)
    ]
    return (
        f"two parts of {op.name} ({op.annotation}) do the same work: {texts[0]} and {texts[1]} "
        f"overlap in {', '.join(common) or 'all of it'}; cut them at one point, or replicate."
    )
