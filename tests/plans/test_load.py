"""Laws of loads: what is computed from paths is what the programs of all ranks say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rvdcomm.cost import StepCost, port_secs
from rvdcomm.plans.bundle import Bundle
from tests.plans.test_bundle import random_bundle

seeds = pytest.mark.parametrize("seed", range(40))


def bytes_of(steps: tuple[StepCost, ...]) -> list[tuple[object, ...]]:
    found = [(step.wire_bytes, step.host_bytes, step.recv_bytes) for step in steps]
    return [step for step in found if step[0]]


def both_of(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[StepCost, ...], tuple[StepCost, ...]]:
    counted = bundle.step_costs
    monkeypatch.setattr("rvdcomm.plans.bundle.MAX_COUNTED", 0)
    return replace(bundle).step_costs, counted


@seeds
@pytest.mark.parametrize("bucket", [32 << 20, 512])
def test_modelled(seed: int, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvdcomm.plans.bundle.BUCKET_BYTES", bucket)
    bundle = random_bundle(seed, executor="dist")
    modelled, counted = both_of(bundle, monkeypatch)
    assert bytes_of(modelled) == bytes_of(counted)
    print([(a.rounds,b.rounds,a.secs/b.secs) for a,b in zip(modelled,counted) if b.secs])
    for a, b in zip(modelled, counted): 
        if b.rounds==a.rounds: assert a.secs == pytest.approx(b.secs)
