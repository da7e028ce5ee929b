"""Words: the plan of a transfer in sentences."""

from __future__ import annotations

from collections.abc import Iterator

import rvdcomm as rv
from rvdcomm.units import bytes_text, secs_text

_NAMES = {
    "exchange": "exchange of pieces",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


def layout_in_words(layout: rv.RVD) -> str:
    """What each rank has under a layout.

    >>> layout_in_words(rv.RVD.parse("R(2)V(1)D(1,4)"))
    '2 copies, cut in 4 along dim 1'
    >>> layout_in_words(rv.RVD.parse("R(1)V(4)D(1)")), layout_in_words(rv.RVD.parse("R(1)V(1)D()"))
    ('4 partial sums', 'the whole tensor on one rank')
    """
    words = [f"{layout.r} copies"] if layout.r > 1 else []
    words += [f"{layout.v} partial sums"] if layout.v > 1 else []
    words += [f"cut in {num} along dim {i}" for i, num in enumerate(layout.d) if num > 1]
    return ", ".join(words) or "the whole tensor on one rank"


def plan_in_words(plan: rv.Plan) -> Iterator[str]:
    """A sentence for what there is, for each step, and for the cost."""
    yield f"At first: {layout_in_words(plan.src.rvd)}."
    for step in plan.path.steps:
        sizes = {len(group) for group in step.groups}
        num, ranks = len(step.groups), " or ".join(map(str, sorted(sizes)))
        where = f"among {ranks} ranks" if num == 1 else f"in {num} groups of {ranks} ranks"
        yield f"{_NAMES.get(step.kind, step.kind).capitalize()} {where}."
    yield f"Then: {layout_in_words(plan.dst.rvd)}."
    yield (
        f"One such move takes {secs_text(plan.cost.secs)} and sends "
        f"{bytes_text(plan.cost.wire_bytes)}; no plan can take less than "
        f"{secs_text(plan.bound.secs)}."
    )
