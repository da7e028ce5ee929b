"""Explain: what was split how, op by op, and one edge in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from difflib import get_close_matches

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.graph import Op
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.side import Side
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use
from superscaler_core.plan import Plan
from superscaler_core.report.names import pattern_of
from superscaler_core.report.table import numbers_text, table

_HEADER = ("#", "op", "annotation", "split", "stages", "devices")


def explain_ops(plan: Plan, width: int = 100) -> str:
    """How every op was split and where its parts are, ops of alike layers in one row.

    ``b/4`` is loop b in 4 pieces, ``2 copies`` that two parts do the same work, ``again`` that the
    backward computes it again.
    """
    stage_of = {op.index: stage.index for stage in plan.stages for op in stage.ops}
    groups: dict[Hashable, list[Op]] = {}
    for op in plan.graph.ops:
        key = pattern_of(op.name), str(op.annotation), split_text(plan, op)
        groups.setdefault(key, []).append(op)
    rows = [
        [
            str(len(ops)),
            pattern_of(ops[0].name),
            str(ops[0].annotation),
            split_text(plan, ops[0]),
            numbers_text(sorted({stage_of[op.index] for op in ops})),
            numbers_text(sorted({d for op in ops for d in _devices(plan, op)})),
        ]
        for ops in groups.values()
    ]
    return table(_HEADER, rows, width)


def split_text(plan: Plan, op: Op) -> str:
    """How an op was split: ``b/4, k/2, 2 copies``."""
    parts = plan.parts(op)
    cuts = {i: {p.range(i) for p in parts} for i in op.sizes}
    words = [f"{i}/{len(ranges)}" for i, ranges in cuts.items() if len(ranges) > 1]
    copies = Counter(part.pieces for part in parts)
    most = max(copies.values())
    words += [f"{most} copies"] if most > 1 else []
    words += ["again"] if any(map(plan.recompute_group, parts)) else []
    return ", ".join(words) or "whole"


def _devices(plan: Plan, op: Op) -> set[int]:
    return {device for p in plan.parts(op) if (device := plan.device(p)) is not None}


def explain_edge(made: Materialized, name: str, topology: rv.Topology | None = None) -> str:
    """An edge (``e3``) or a use of a weight (by its name): its ends, and the plans of all its ways.

    Raises:
        PlanError: there is none of that name.
    """
    known: dict[str, Edge | Use] = {edge.name: edge for edge in made.edges.all}
    known |= {use.name: use for use in made.weights.uses}
    found = known.get(name)
    if found is None:
        near = ", ".join(get_close_matches(name, known, 3, 0.0))
        last = len(made.edges.all) - 1
        edges = f"edges of activations are e0 to e{last}, " if last >= 0 else ""
        raise PlanError(
            f"there is no edge {name!r}; {edges}uses of weights have the names of parameters; near "
            f"are {near}."
        )
    lines = [f"{name}: {found.tensor} {found.tensor.dtype}"]
    if isinstance(found, Edge):
        writer = made.plan.graph.producer[found.tensor]
        lines.append(f"  from  {writer.name} in stage {found.src_stage}: {_side_text(found.src)}")
        lines.append(f"  to    {_names(found.readers)} in stage {found.dst_stage}: "
                     f"{_side_text(found.dst.whole)}")  # fmt: skip
        ways: Mapping[str, tuple[Transfer, ...]] = {
            "forward": found.forward, "backward": found.backward
        }  # fmt: skip
    else:
        lines.append(f"  stored  {_side_text(found.storage)}")
        lines.append(f"  read    by {_names(found.readers)}: {_side_text(found.side.whole)}")
        ways = {"fetch": found.fetch, "reduce": found.reduce}
    return "\n".join([*lines, *(text for way in ways.items() for text in _way(*way, topology))])


def _names(readers: Iterable[tuple[Op, int]]) -> str:
    return ", ".join(dict.fromkeys(op.name for op, _ in readers)) or "nobody"


def _side_text(side: Side) -> str:
    shards = [f"{shard.box} on {device}" for device, shard in sorted(side.shards.items())]
    more = f", {len(shards) - 4} more" if len(shards) > 4 else ""
    summands = f" in {side.num_summands} summands" if side.num_summands > 1 else ""
    return ", ".join(shards[:4]) + more + summands


def _way(name: str, legs: tuple[Transfer, ...], topology: rv.Topology | None) -> list[str]:
    moving = [leg for leg in legs if not leg.is_idle]
    if not moving:
        return ["", f"{name}: nothing moves"]
    texts = []
    for leg in moving:
        where = f" of region {leg.box}" if len(legs) > 1 else ""
        texts += ["", f"{name}{where}:", str(leg.plan(topology))]
    return texts
