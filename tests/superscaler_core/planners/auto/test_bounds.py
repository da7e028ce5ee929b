"""Lower bounds of a request hold for every microbatch size and every growth of op speeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import OpTimes, Reach, signature
from superscaler_core.evaluation import Request
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.simulator import PROFILES
from tests.superscaler_core.small import two_linears

BATCH = 8192
STEEP = Reach(((1e9, 1e-2), (1e11, 1.0)))
"""Up to a size, all products take equally long; passes over memory almost do."""

PROFILES_OF = {
    "v100": PROFILES["v100"],
    "steep": replace(
        PROFILES["v100"], products={"float64": STEEP}, memory=Reach(((1e6, 0.1), (1e9, 1.0)))
    ),
    "no launch": replace(PROFILES["v100"], launch_secs=0.0),
}


def linears(samples: int) -> ss.Graph:
    return two_linears(samples, 1024, 4096, 1024)


def least_secs(profile: ss.DeviceProfile, samples: int, pieces: int) -> float:
    """Seconds to compute a batch on one device, with every op cut into pieces of its batch."""
    times, found = OpTimes(profile), 0.0
    for op in linears(samples).ops:
        cut = ss.split("b", pieces)(ss.Part(op)) if "b" in op.sizes else [ss.Part(op)]
        found += sum(times.forward_secs(each) + times.backward_secs(each) for each in cut)
    return BATCH // samples * found


@pytest.mark.parametrize(
    "name, samples",
    [*zip([*PROFILES_OF] * 2, cycle([(512, 1024, 8192), (64, 1024), (4096,), (64, 1024)]))],
)
def test_no_microbatch_size_is_faster_than_the_bound(name: str, samples: tuple[int, ...]) -> None:
    profile, topology = PROFILES_OF[name], rv.Topology.single_host(1, 5e-6, 20e9)
    bounds = Bounds(Request(linears, samples, BATCH, (0,), topology, profile, 1 << 34))
    assert (
        0
        < bounds.computing_secs
        <= min(least_secs(profile, n, p) for n in samples for p in (1, 2, 4))
    )


def test_bound_holds_if_a_library_computes_large_microbatches_by_a_faster_algorithm() -> None:
    samples, secs = (64, 512, BATCH), {64: 1e-3, 512: 1.0, BATCH: 1e-2}
    table = {
        signature(ss.Part(op)): (secs[num], secs[num]) for num in samples for op in linears(num).ops
    }
    profile = replace(PROFILES["v100"], op_secs=table)
    topology = rv.Topology.single_host(1, 5e-6, 20e9)
    bounds = Bounds(Request(linears, samples, BATCH, (0,), topology, profile, 1 << 34))
    least = least_secs(profile, BATCH, 1)
    assert bounds.secs <= least < bounds.computing_secs
