"""Plans on random networks are right and near the bound; the table names what it shows."""

from __future__ import annotations

import random

import pytest

import rvdcomm as rv
from bench import synthesis
from tests.oracle import plan_faults


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_bytes, alpha_secs", [(64 << 20, 0.0), (64 << 10, 10e-6)])
def test_plans_on_random_networks_are_proved_and_near_the_bound(
    seed: int, num_bytes: int, alpha_secs: float
) -> None:
    rng = random.Random(seed)
    network = synthesis.random_network(rng, alpha_secs)
    src = synthesis.random_layout(rng, num_bytes, network.ranks, True)
    dst = synthesis.random_layout(rng, num_bytes, network.ranks, False)
    plan = rv.plan(src, rv.Layout(src.shape, dst.rvd, dst.ranks), topology=network)
    plan.verify()
    assert plan.bound.secs <= plan.cost.secs * (1 + 1e-9)
    if not alpha_secs and plan.bound.secs:
        assert plan.gap <= 1.5


@pytest.mark.parametrize("seed", range(10))
def test_small_plans_on_random_networks_move_the_right_data(seed: int) -> None:
    rng = random.Random(seed)
    network = synthesis.random_network(rng, 0.0)
    src = synthesis.random_layout(rng, 64 << 10, network.ranks, True)
    dst = synthesis.random_layout(rng, 64 << 10, network.ranks, False)
    ends = src, rv.Layout(src.shape, dst.rvd, dst.ranks)
    assert plan_faults(rv.plan(*ends, "int64", network)) == []


def test_the_table_names_networks_and_collectives() -> None:
    rows = [
        synthesis.row_of(name, what, 1 << 24, *_ends(texts, network), network)
        for name, network in [("DGX-1", synthesis.known()["DGX-1"])]
        for what, texts in synthesis.COLLECTIVES.items()
    ]
    result = {"rows": rows, "random": synthesis.summary([])}
    text = synthesis.report(result)
    assert text.count("DGX-1") == 3
    assert all(len(line) <= 120 for line in text.splitlines())
    assert all(1 <= row["over_bound"] <= row["steps_over_bound"] for row in rows)


def _ends(texts: tuple[str, str], network: rv.Network) -> list[rv.Layout]:
    return [rv.Layout((4096, 1024), t.format(n=len(network.ranks)), network.ranks) for t in texts]
