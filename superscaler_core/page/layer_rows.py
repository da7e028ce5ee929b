"""Layer rows: how the ops of each layer are split, recomputed and placed."""

from __future__ import annotations

import re
from typing import Any

from superscaler_core.graph.graph import Op
from superscaler_core.materialize import Materialized
from superscaler_core.report import split_text
from superscaler_core.report.table import numbers_text

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def layer_of(op: Op) -> str:
    """The layer of an op: its module up to the first number, or the first name of the path."""
    module = op.module or op.name
    found = _LAYER.match(module)
    return found[0] if found else module.partition(".")[0]


class LayerRows:
    """The decisions about every op; equal ones are stored once.

    Args:
        made: the plan.
    """

    def __init__(self, made: Materialized) -> None:
        self._made = made
        self._segments: dict[str, int] = {}
        self._ops_of: list[list[int]] = []

    def segment(self, name: str, device: int) -> int:
        """The number of a segment, whose ops the value then has."""
        if name not in self._segments:
            self._segments[name] = len(self._ops_of)
            ops = self._made.segment(name, device).ops
            self._ops_of.append(list(dict.fromkeys(op.index for op in ops)))
        return self._segments[name]

    @property
    def value(self) -> dict[str, Any]:
        """For JSON: layers, the ops with the numbers of their layers and decisions, segments."""
        plan = self._made.plan
        stage_of = {op.index: stage.index for stage in plan.stages for op in stage.ops}
        layers: dict[str, int] = {}
        decisions: dict[tuple[Any, ...], int] = {}
        ops: list[list[Any]] = []
        for op in plan.graph.ops:
            parts = plan.parts(op)
            name = layer_of(op)
            decision = (
                str(op.annotation),
                split_text(plan, op),
                any(map(plan.recompute_group, parts)),
                any(map(plan.offload_group, parts)),
                stage_of.get(op.index, -1),
                numbers_text(sorted({d for d in map(plan.device, parts) if d is not None})),
            )
            layer = layers.setdefault(name, len(layers))
            short = op.name.removeprefix(f"{name}.").removeprefix(f"{name}:")
            ops.append([layer, short, decisions.setdefault(decision, len(decisions))])
        return {
            "layers": list(layers),
            "decisions": [list(decision) for decision in decisions],
            "ops": ops,
            "segments": self._ops_of,
        }
