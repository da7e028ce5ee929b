"""Hosts: a device is late when its host is, and never otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import (
    PROFILES,
    Collective,
    CommCosts,
    DeviceProfile,
    OpTimes,
    launches_of,
)
from superscaler_core.materialize import Transfer
from superscaler_core.simulator import simulate
from tests.superscaler_core.cases import Case

BARE = PROFILES["a100"]
ROUNDING = 1e-9


def eager(issue_secs: float, **more: object) -> DeviceProfile:
    return replace(BARE, issue_secs=issue_secs, **more)


def one_device() -> ss.Compiled:
    return Case("data_parallel", 1, model="mlp").compiled()


def kernels(compiled: ss.Compiled) -> list[tuple[float, int]]:
    """For each op forward, then each op backward: its time on the device, and its kernels.

    A product adds a bias in its own kernel.
    """
    times = OpTimes(BARE)
    parts = [part for op in compiled.plan.graph.ops for part in compiled.plan.parts(op)]
    apart = [part for part in parts if part.op.kind != "add_bias"]
    found = [(times.of(part.form)[0], launches_of(part).forward) for part in apart]
    return found + [(times.of(p.form)[1], launches_of(p).backward) for p in reversed(parts)]


@pytest.mark.parametrize("issue_secs", [1e-9, 1e-6, 5e-6, 2e-5, 1e-3])
def test_step_of_one_device_is_that_of_a_host_followed_kernel_by_kernel(issue_secs: float) -> None:
    compiled = one_device()
    found = simulate(compiled, eager(issue_secs))
    host = device = 0.0
    for secs, num in kernels(compiled):
        for _ in range(num):
            host += issue_secs
            device = max(device, host) + secs / num
        if not num:
            device += secs
    bare = simulate(compiled, BARE).secs - sum(secs for secs, _ in kernels(compiled))
    assert found.secs == pytest.approx(max(host, device) + bare, rel=1e-6)


@pytest.mark.parametrize("name", ["hybrid", "zero3", "interleaved", "megatron"])
def test_slower_host_never_makes_a_step_faster(name: str) -> None:
    options = {"hybrid": {"tp": 2, "pp": 2, "microbatches": 4}, "interleaved": {"chunks": 2}}
    compiled = Case(name, 4, options.get(name, {}), sizes={"layers": 8}).compiled()
    steps = [simulate(compiled, eager(secs)).secs for secs in (0.0, 1e-7, 1e-6, 1e-5, 1e-4)]
    assert steps == sorted(steps)
    assert steps[0] == simulate(compiled, BARE).secs
    for secs in (1e-6, 1e-4):
        waiting = simulate(compiled, eager(secs, host_waits=True)).secs
        assert waiting >= simulate(compiled, eager(secs)).secs * (1 - ROUNDING)


def test_host_bound_step_takes_the_time_of_the_host() -> None:
    compiled, issue_secs = Case("data_parallel", 2, model="mlp").compiled(), 1e-3
    found = simulate(compiled, eager(issue_secs))
    num = sum(num for _, num in kernels(one_device()))
    assert num - 2 < found.secs / issue_secs < num + 4


def test_action_takes_the_host_its_time() -> None:
    """A device that waits for nothing else is later by each action of its microbatches."""
    compiled = Case("hybrid", 1, {"microbatches": 3}).compiled()
    bare = simulate(compiled, eager(1e-9, host_waits=True)).secs
    late = simulate(compiled, eager(1e-9, host_waits=True, action_secs=1e-2)).secs
    assert late - bare == pytest.approx(3 * 2 * 1e-2, rel=1e-3)


@pytest.mark.parametrize("num", [2, 4])
def test_all_reduce_takes_its_measured_time(num: int) -> None:
    """Inside a host; between hosts the links count."""
    size, known = 1 << 20, Collective(50e-6, 200e9)
    src, dst = (rv.Layout((size,), rvd) for rvd in (f"R(1)V({num})D(1)", f"R({num})V(1)D(1)"))
    transfer = Transfer(rv.Box.of_shape((size,)), src, dst, "float32")
    moved = 2 * (num - 1) / num * 4 * size
    host = rv.Topology.single_host(8, 1e-6, 300e9)
    secs = CommCosts(host, ((num, known),)).secs(transfer, "rvd").secs
    assert secs == pytest.approx(known.latency_secs + moved / known.bytes_per_sec)
    assert CommCosts(host, ((num + 1, known),)).secs(transfer, "rvd").secs < secs
    link = rv.Link(1e-6, 300e9)
    apart = rv.Topology.hosts([[rank] for rank in range(8)], link, link)
    secs = [CommCosts(apart, table).secs(transfer, "rvd").secs for table in ((), ((num, known),))]
    assert secs[0] == secs[1]


def test_host_issues_a_measured_collective_in_its_own_time() -> None:
    table = {2: Collective(50e-6, 200e9, 1e-4), 4: Collective(50e-6, 200e9)}
    profile = replace(BARE, issue_secs=1e-5, collectives=table)
    assert [profile.call_secs(ring) for ring in (0, 2, 3, 4)] == [1e-5, 1e-4, 1e-5, 1e-5]
