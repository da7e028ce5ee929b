"""Planned: the bytes that ranks send in a step, computed from the plans of the transfers."""

from __future__ import annotations

import numpy as np

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.program.transfer import Transfer


def planned_bytes(compiled: Compiled, topology: rv.Topology) -> list[int]:
    """Bytes that each rank sends to others in a step, by rank; no weight may be in a window."""
    made, plan = compiled.materialized, compiled.plan
    assert not plan.fsdp_units, "weights in windows move once a microbatch"
    each_microbatch = [leg for e in made.edges.all for leg in (*e.forward, *e.backward)]
    each_step = [leg for use in made.weights.uses for leg in (*use.fetch, *use.reduce)]
    each_step += made.loss
    total = dict.fromkeys(plan.devices, 0)
    for legs, times in ((each_microbatch, plan.num_microbatches), (each_step, 1)):
        for leg in legs:
            for rank, count in _sent_bytes(leg, topology).items():
                total[rank] += times * count
    return [total[rank] for rank in sorted(total)]


def _sent_bytes(leg: Transfer, topology: rv.Topology) -> dict[int, int]:
    """Bytes that each rank sends for a transfer, as the simulation of its plan counts them."""
    shards = {
        rank: np.zeros(leg.src.cell(rank).box.shape, np.dtype(leg.dtype)) for rank in leg.src.ranks
    }
    return dict(rv.simulate(leg.plan(topology), shards).sent_bytes)
