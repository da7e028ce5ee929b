"""Explain: how ops are split, op by op."""

from __future__ import annotations

from collections import Counter

from superscaler_core.graph.graph import Op
from superscaler_core.grouped import grouped
from superscaler_core.plan import Plan
from superscaler_core.report.move import pattern_of
from superscaler_core.report.table import numbers_text, table

_HEADER = ("#", "op", "annotation", "split", "stages", "devices")


def explain_ops(plan: Plan, width: int = 100) -> str:
    """How every op is split and where its parts are; ops of equal layers share a row.

    ``b/4`` is loop b in 4 pieces, ``2 copies`` means that two parts do the same work, ``again``
    that the backward recomputes it, ``offloaded`` that its kept values wait on the host.
    """
    stage_of = {op.index: stage.index for stage in plan.stages for op in stage.ops}

    def texts_of(op: Op) -> tuple[str, str, str]:
        return pattern_of(op.name), str(op.annotation), split_text(plan, op)

    rows = []
    for texts, ops in grouped((texts_of(op), op) for op in plan.graph.ops).items():
        stages = numbers_text(sorted({stage_of[op.index] for op in ops}))
        devices = {d for op in ops for d in map(plan.device, plan.parts(op)) if d is not None}
        rows.append([str(len(ops)), *texts, stages, numbers_text(sorted(devices))])
    return table(_HEADER, rows, width)


def split_text(plan: Plan, op: Op) -> str:
    """How an op is split: ``b/4, k/2, 2 copies``."""
    parts = plan.parts(op)
    cuts = {i: {p.range(i) for p in parts} for i in op.sizes}
    words = [f"{i}/{len(ranges)}" for i, ranges in cuts.items() if len(ranges) > 1]
    copies = Counter(part.pieces for part in parts)
    most = max(copies.values())
    words += [f"{most} copies"] if most > 1 else []
    words += ["again"] if any(map(plan.recompute_group, parts)) else []
    words += ["swapped"] if any(map(plan.offload_group, parts)) else []
    return ", ".join(words) or "whole"
