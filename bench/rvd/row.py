"""The row of a case in a result: what it is, how long the methods took, and what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.rvd.cases import Case
from bench.rvd.methods import ITEM_BYTES, point_to_point_traffic
from rvdcomm import Plan


def row_of(case: Case, plan: Plan, samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The row of ``case``.

    Args:
        case: what was asked.
        plan: what rvdcomm planned for it.
        samples: for every method its times, in seconds.
    """
    return {
        **case.to_json(),
        "samples": samples,
        "steps": [step.kind for step in plan.path.steps],
        "wire_bytes": plan.cost.wire_bytes,
        "host_bytes": plan.cost.host_bytes,
        "bound_wire_bytes": plan.bound.wire_bytes,
        "bound_secs": plan.bound.secs,
        "cost_secs": plan.cost.secs,
        "p2p_bytes": sum(point_to_point_traffic(*case.layouts, ITEM_BYTES).values()),
    }
