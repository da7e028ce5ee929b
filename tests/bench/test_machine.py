"""Laws of fitted overheads, of links scaled to one core per rank, and of the plans in a race."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rvdcomm as rv
from bench.machine import machine
from bench.machine.method import StepSecs
from bench.machine.overheads import FITTED, busy_secs, fitted, programs_on
from superscaler_core.evaluation import Candidate, Trial
from superscaler_core.simulator import PROFILES, simulate

LINKS = rv.Topology.single_host(4, 10e-6, 10e9)


def test_fit_recovers_the_overheads_of_simulated_steps() -> None:
    overheads = dict(zip(FITTED, (120e-6, 30e-6, 140e-6, 70e-6), strict=True))
    bare = replace(PROFILES["v100"], num_cores=2)
    known = replace(bare, **overheads, num_cores=1.75, wake_secs=450e-6)
    _, programs = programs_on(4, LINKS)
    steps = [
        StepSecs(simulate(program, known, LINKS).secs, cpu)
        for program, cpu in zip(
            programs, busy_secs(programs, LINKS, replace(known, num_cores=0)), strict=True
        )
    ]
    found = fitted(programs, steps, LINKS, bare)
    for name, secs in overheads.items():
        assert getattr(found, name) == pytest.approx(secs, rel=0.02), name
    assert (found.num_cores, found.wake_secs) == pytest.approx((1.75, 450e-6))


def test_links_of_one_host_are_scaled_by_the_ranks_per_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(machine, "num_cores_here", lambda: 2)
    (level,) = machine.with_a_core_each(LINKS).levels
    assert (level.link.alpha_secs, level.link.bytes_per_sec) == pytest.approx((5e-6, 20e9))
    monkeypatch.setattr(machine, "num_cores_here", lambda: 8)
    assert machine.with_a_core_each(LINKS).levels == LINKS.levels


def test_links_between_hosts_are_not_scaled() -> None:
    fast, slow = rv.Link(10e-6, 10e9), rv.Link(60e-6, 25e6)
    hosts = rv.Topology.hosts([range(2), range(2, 4)], intra=fast, inter=slow)
    assert machine.with_a_core_each(hosts) is hosts


def test_estimates_race_beside_plans_that_were_looked_at_in_full() -> None:
    once, twice, never = (Candidate(name, 1, lambda plan: None) for name in ("a", "b", "c"))
    trials = [
        Trial(once, 3.0, 10, is_estimate=True),
        Trial(twice, 1.0, 20, is_estimate=True),
        Trial(never, 0.5, 30, is_estimate=True),
        Trial(twice, 2.0, 20),
        Trial(never, problem="too large"),
    ]
    assert [(plan.name, plan.secs) for plan in machine.distinct(trials)] == [("b", 2.0), ("a", 3.0)]
