"""Planned: the bytes that ranks send in a step, computed from the plans of the transfers."""

from __future__ import annotations

import numpy as np

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.materialize import Transfer


def planned_bytes(compiled: Compiled, topology: rv.Topology) -> list[int]:
    """Bytes that each rank sends to others in a step, by rank; no weight may be in a window."""
    made, plan = compiled.materialized, compiled.plan
    assert not plan.fsdp_units, "weights in windows move once a microbatch"
    each_microbatch = [
        sub_transfer for e in made.edges.all for sub_transfer in (*e.forward, *e.backward)
    ]
    each_step = [
        sub_transfer for use in made.weights.uses for sub_transfer in (*use.fetch, *use.reduce)
    ]
    each_step += made.loss
    total = dict.fromkeys(plan.devices, 0)
    for sub_transfers, times in ((each_microbatch, plan.num_microbatches), (each_step, 1)):
        for sub_transfer in sub_transfers:
            for rank, count in _sent_bytes(sub_transfer, topology).items():
                total[rank] += times * count
    return [total[rank] for rank in sorted(total)]


def _sent_bytes(sub_transfer: Transfer, topology: rv.Topology) -> dict[int, int]:
    """Bytes that each rank sends for a transfer, as the simulation of its plan counts them."""
    shards = {
        rank: np.zeros(sub_transfer.src.cell(rank).box.shape, np.dtype(sub_transfer.dtype))
        for rank in sub_transfer.src.ranks
    }
    return dict(rv.simulate(sub_transfer.plan(topology), shards).sent_bytes)
