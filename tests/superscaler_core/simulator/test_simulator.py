"""Simulated steps: closed forms if communication is free, and the costs of communication."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import (
    METHODS,
    TICKS_PER_SEC,
    CommCosts,
    DeviceProfile,
    OpTimes,
    comm_costs_on,
)
from superscaler_core.plans import PLANS
from superscaler_core.published.asynchronous import ampnet, pipedream
from superscaler_core.published.chimera import chimera
from superscaler_core.schedules import gpipe, interleaved, nf1b, one_f_one_b, timeline
from superscaler_core.simulator import PROFILES, Simulated, simulate
from superscaler_core.simulator.timeline import Stepper
from superscaler_core.simulator.trace import events
from superscaler_core.simulator.work import Methods, Work
from tests.superscaler_core.cases import Case
from tests.superscaler_core.simulated_chains import chain, free, given, pipelined
from tests.superscaler_core.small import on_one

ROUNDING = 1e-9
"""Relative tolerance: times are whole picoseconds."""

TWO_HOSTS = rv.Topology.hosts(
    [[0, 1], [2, 3]], intra=rv.Link(5e-6, 100e9), inter=rv.Link(20e-6, 1e9)
)


# --- closed forms (ORACLES 1.1, 1.2) ------------------------------------------------------------


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    ("d", "n", "f", "b"), [(2, 4, 1e-3, 1e-3), (4, 4, 1e-3, 2e-3), (8, 32, 3e-3, 5e-3)]
)
def test_time_of_uniform_stages_equals_the_closed_form(
    order: Any, d: int, n: int, f: float, b: float
) -> None:
    compiled = pipelined(d, d, order(d, n), free(d))
    found = simulate(compiled, given(compiled.plan.graph, f, b))
    assert found.secs == pytest.approx((n + d - 1) * (f + b), rel=ROUNDING)
    assert found.bubble_of_makespan == pytest.approx((d - 1) / (n + d - 1), rel=ROUNDING)
    assert found.bubble_of_ideal == pytest.approx((d - 1) / n, rel=ROUNDING)


@pytest.mark.parametrize("order", [pipedream, ampnet])
def test_an_asynchronous_run_is_filled_and_drained_once(order: Any) -> None:
    f, b = 1e-3, 2e-3
    for n in (8, 24):
        compiled = pipelined(4, 4, order(4, n), free(4))
        found = simulate(compiled, given(compiled.plan.graph, f, b))
        assert found.secs == pytest.approx((n + 3) * (f + b), rel=ROUNDING)


def test_every_update_of_an_asynchronous_run_takes_the_time_of_the_optimizer() -> None:
    flush, run = (
        simulate(Case(name, 2, {"microbatches": 6}).compiled(), "v100")
        for name in ("one_f_one_b", "pipedream")
    )
    updates = [ran.inside for ran in run.timeline.runs if ran.event.kind == "U"]
    spans = [
        (work_event, (end - start) / TICKS_PER_SEC)
        for i in updates
        for work_event, start, end in i.spans
    ]
    for device, secs in flush.optimizer_secs.items():
        mine = [length for work_event, length in spans if work_event.devices == (device,)]
        assert mine == pytest.approx([secs] * 6)
        assert run.optimizer_secs[device] == pytest.approx(6 * secs)


@pytest.mark.parametrize(("d", "n", "v"), [(4, 8, 2), (4, 8, 4), (8, 16, 2), (4, 4, 2)])
def test_time_of_interleaved_stages_equals_the_closed_form(d: int, n: int, v: int) -> None:
    f, b = 1e-3, 2e-3
    compiled = pipelined(d * v, d, interleaved(d, n, v), free(d))
    found = simulate(compiled, given(compiled.plan.graph, f, b))
    assert found.secs == pytest.approx((n * v + d - 1) * (f + b), rel=ROUNDING)
    assert found.bubble_of_makespan == pytest.approx((d - 1) / (n * v + d - 1), rel=ROUNDING)


ORDERS = [gpipe(4, 6), one_f_one_b(4, 6), interleaved(4, 8, 2), chimera(4, 4), chimera(6, 12)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_simulated_bubbles_equal_those_of_the_schedule(order: ss.Schedule) -> None:
    num_devices = len(order.rows)
    compiled = pipelined(order.num_stages, num_devices, order, free(num_devices))
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    paper = timeline(order, {"F": 1, "B": 2})
    assert found.secs == pytest.approx(float(paper.makespan) * 1e-3, rel=ROUNDING)
    for name in ("bubble_of_makespan", "bubble_of_ideal", "bubble_of_span"):
        expected = float(Fraction(getattr(paper, name)))
        assert getattr(found, name) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize(("n", "recycle"), [(6, 2), (4, 1)])
def test_each_turn_without_gradient_takes_one_forward(n: int, recycle: int) -> None:
    order = nf1b(4, n, recycle)
    compiled = pipelined(4, 4, order, free(4), recycles=True)
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    paper = timeline(order, {"f": 1, "F": 1, "B": 2})
    work = n * (recycle + 1 + 2) * 1e-3
    assert found.secs == pytest.approx(float(paper.makespan) * 1e-3, rel=ROUNDING)
    assert list(found.compute_secs.values()) == pytest.approx([work] * 4, rel=ROUNDING)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_gradient_accumulation_adds_time_after_the_first_microbatch(num_microbatches: int) -> None:
    graph = chain(2)
    plan = on_one(ss.Plan(graph, [0]))
    plan.op_order(one_f_one_b(1, num_microbatches))
    profile = replace(given(graph, 1e-3, 2e-3), bytes_per_sec=1e6)
    found = simulate(ss.compile(plan, optimizer="sgd"), profile)
    # Adding the gradients of two weights of 8 x 8 floats takes two reads and a write each. The op
    # ``sum`` has no measured time.
    sums = (num_microbatches - 1) * 2 * 3 * 8 * 8 * 4 / 1e6
    loss = num_microbatches * (4 * 8 * 4 + 4 + (4 + 4 * 8 * 4) + 4 * 8 * 4) / 1e6
    optimizer = 3 * 2 * 8 * 8 * 4 / 1e6
    expected = num_microbatches * 2 * 3e-3 + sums + loss + optimizer
    assert found.secs == pytest.approx(expected, rel=ROUNDING)


def test_recomputation_adds_a_forward() -> None:
    graph = chain(2)
    plan = on_one(ss.Plan(graph, [0]))
    plan.recompute(graph.ops[:1])
    found = simulate(ss.compile(plan), given(graph, 1e-3, 2e-3))
    assert found.secs == pytest.approx(2 * 3e-3 + 1e-3, rel=ROUNDING)


# --- communication ------------------------------------------------------------------------------


def cut_in_batch(num_devices: int, topology: rv.Topology, **options: Any) -> ss.Compiled:
    graph = chain(1, batch=8, width=64)
    plan = ss.Plan(graph, range(num_devices))
    PLANS["data_parallel"](plan, **options)
    return ss.compile(plan, topology=topology)


@pytest.mark.parametrize("method", ["rvd", "p2p"])
def test_data_parallel_step_takes_the_time_of_ops_plus_all_reduces(method: str) -> None:
    compiled = cut_in_batch(4, TWO_HOSTS)
    alone = simulate(compiled, PROFILES["v100"], free(4))
    found = simulate(compiled, PROFILES["v100"], communication=method)
    comm_costs = CommCosts(TWO_HOSTS)
    (use,) = compiled.materialized.weights.uses
    costs = [
        comm_costs.of([sub_transfer], method).ticks * 1e-12
        for sub_transfer in (*use.reduce, *compiled.materialized.loss)
    ]
    assert alone.communication_secs[0] == 0
    assert found.secs == pytest.approx(alone.secs + sum(costs), rel=ROUNDING)
    assert found.communication_secs[0] == pytest.approx(sum(costs), rel=ROUNDING)


@pytest.mark.parametrize("method", METHODS)
def test_prices_that_are_kept_are_those_of_a_new_simulation(method: str) -> None:
    comm_costs = comm_costs_on(TWO_HOSTS)
    for width, tp in product((32, 64, 28), (1, 2, 4)):
        sizes = {"width": width, "heads": 4}
        plan = Case("hybrid", 4, {"tp": tp, "pp": 1}, sizes=sizes).planned()
        compiled = ss.compile(plan, topology=TWO_HOSTS)
        kept = simulate(compiled, PROFILES["v100"], communication=method, comm_costs=comm_costs)
        new = simulate(compiled, PROFILES["v100"], communication=method)
        assert kept.secs == new.secs
    assert comm_costs_on(TWO_HOSTS) is comm_costs


def test_breakdown_adds_up_to_the_step_and_the_memory_of_the_fullest_device() -> None:
    found = simulate(Case("hybrid", 4, {"tp": 2, "pp": 2}).compiled(), PROFILES["v100"])
    parts = found.breakdown
    assert sum(parts.shares.values()) == pytest.approx(1.0)
    assert sum(parts.memory.values()) == max(found.peak_bytes.values())
    assert {name: sent for name, (sent, _) in parts.levels.items()} == {
        level.name: level.sent_bytes for level in found.levels
    }


def test_plans_are_not_slower_than_point_to_point() -> None:
    compiled = Case("hybrid", 4, {"tp": 2, "pp": 2}, sizes={"width": 64}).compiled()
    secs = {
        (intra, inter): simulate(
            compiled, PROFILES["v100"], TWO_HOSTS, intra=intra, inter=inter
        ).secs
        for intra in ("rvd", "p2p")
        for inter in ("rvd", "p2p")
    }
    assert secs["rvd", "rvd"] <= min(secs.values())
    assert secs["p2p", "p2p"] >= max(secs.values())


def test_transfers_during_computation_are_hidden() -> None:
    # Stage 0 has computed everything that it can when the first tensor arrives, so it waits once.
    compiled = pipelined(2, 2, one_f_one_b(2, 8), TWO_HOSTS)
    slow = simulate(compiled, given(compiled.plan.graph, 1e-2, 1e-2))
    fast = simulate(compiled, given(compiled.plan.graph, 1e-7, 1e-7))
    assert 0.3 < slow.overlap < 1
    assert fast.overlap < slow.overlap


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=["near", "far"])
def test_stages_that_share_a_nic_share_its_bandwidth(hosts: list[list[int]]) -> None:
    """Two all-reduces of gradients run at once. Between hosts they take turns on the NIC."""
    graph = chain(2, batch=8, width=64)
    inter = rv.Link(0.0, 1e9)
    topology = rv.Topology.hosts(hosts, intra=rv.Link(0.0, 1e15), inter=inter)
    plan = ss.Plan(graph, range(4))
    # Layer 0 is on devices 0 and 1, layer 1 on 2 and 3: "far" puts every pair on two hosts.
    for op in graph.ops:
        parts = plan.op_trans(op, ss.split("b", 2))
        plan.op_assign(parts, [0, 1] if op.index == 0 else [2, 3])
    plan.pipeline([1])
    plan.op_order(one_f_one_b(2, 1))
    compiled = ss.compile(plan, topology=topology)
    found = simulate(compiled, given(graph, 0.0, 0.0))
    reduce_ticks = sum(
        end - start
        for start, end in {
            (s, e)
            for ran in found.timeline.runs
            for work_event, s, e in ran.inside.spans
            if work_event.name == "gradients"
        }
    )
    nic_secs = 64 * 64 * 4 / inter.bytes_per_sec
    # Two ranks exchange halves twice, so a NIC sends the whole gradient in an all-reduce.
    far = hosts == [[0, 2], [1, 3]]
    expected = (nic_secs + 2 * nic_secs) if far else 0.0
    assert reduce_ticks * 1e-12 == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_levels_count_the_bytes_of_the_plans() -> None:
    compiled = cut_in_batch(4, TWO_HOSTS)
    found = simulate(compiled, PROFILES["v100"])
    costs = [
        sub_transfer.plan(TWO_HOSTS).cost
        for sub_transfer in (
            *compiled.materialized.weights.uses[0].reduce,
            *compiled.materialized.loss,
        )
    ]
    assert [level.name for level in found.levels] == ["rank", "host", "host memory"]
    assert sum(level.sent_bytes for level in found.levels) == sum(c.wire_bytes for c in costs)
    assert found.levels[1].sent_bytes == sum(c.host_bytes for c in costs)


# --- the host's memory --------------------------------------------------------------------------


def test_weights_on_the_host_cross_the_link_twice_a_step() -> None:
    compiled = Case("zero_offload", 2).compiled()
    found = simulate(compiled, PROFILES["v100"])
    sides = compiled.materialized.weights.storage.values()
    stored = 8 * sum(shard.box.num_elements for side in sides for shard in side.shards.values())
    assert found.levels[-1].sent_bytes == 2 * stored
    speed = PROFILES["v100"].host_bytes_per_sec
    assert found.levels[-1].exposed_secs == pytest.approx(2 * stored / 2 / speed, rel=ROUNDING)
    # Adam reads gradients, and reads and writes weights and two states.
    speed = PROFILES["v100"].host_memory_bytes_per_sec
    assert sum(found.optimizer_secs.values()) == pytest.approx(7 * stored / speed, rel=ROUNDING)


@pytest.mark.parametrize(("num_swapped", "num_waits"), [(4, 0), (5, 2)])
def test_swapped_activations_move_during_computation(num_swapped: int, num_waits: int) -> None:
    graph = chain(6)
    plan = on_one(ss.Plan(graph, [0]))
    plan.offload(*([op] for op in graph.ops[1 : 1 + num_swapped]))
    compiled = ss.compile(plan)
    slow, fast = (
        simulate(compiled, replace(given(graph, secs, secs), host_bytes_per_sec=1e6))
        for secs in (1e-2, 1e-7)
    )
    # Every layer keeps its input of 4 x 8 floats. The copies of the last op have no computation to
    # overlap with.
    num_bytes = 4 * 8 * 4
    assert slow.levels[-1].sent_bytes == fast.levels[-1].sent_bytes == 2 * num_swapped * num_bytes
    assert slow.levels[-1].exposed_secs == pytest.approx(num_waits * num_bytes / 1e6, rel=ROUNDING)
    assert fast.levels[-1].exposed_secs > num_swapped * num_bytes / 1e6


# --- consistency --------------------------------------------------------------------------------

KNOBS: dict[str, list[dict[str, Any]]] = {
    "hybrid": [{"tp": 2, "pp": 2, "microbatches": 5}, {"pp": 2, "microbatches": 3}],
    "interleaved": [{"microbatches": 8, "chunks": 2}],
    "zero3": [{}],
    "megatron": [{}],
    "gpipe": [{"microbatches": 4}],
}
LAYERS = {"interleaved": 8, "gpipe": 4}
EAGER = replace(PROFILES["v100"], issue_secs=2e-5, action_secs=1e-4)
HOSTS = [PROFILES["v100"], EAGER, replace(EAGER, host_waits=True)]


@settings(max_examples=24, deadline=None)
@drawn(
    st.sampled_from([(name, options) for name, all_ in KNOBS.items() for options in all_]),
    st.sampled_from(["rvd", "p2p"]),
    st.sampled_from([1e7, 1e9, 1e11]),
    st.sampled_from([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]]]),
    st.sampled_from(HOSTS),
)
def test_remembered_runs_equal_simulated_runs(
    case: tuple[str, dict[str, Any]],
    method: str,
    speed: float,
    hosts: list[list[int]],
    profile: DeviceProfile,
) -> None:
    name, options = case
    compiled = Case(name, 4, options, sizes={"layers": LAYERS.get(name, 2)}).compiled()
    topology = rv.Topology.hosts(hosts, rv.Link(1e-6, 1e10), rv.Link(1e-5, speed))

    def run(is_memoized: bool) -> Any:
        times, comm_costs = OpTimes(profile), CommCosts(topology)
        work = Work(compiled.materialized, times, comm_costs, Methods(method, method))
        secs = dict.fromkeys(compiled.plan.devices, 1e-4)
        return Stepper(compiled.materialized, work, secs, is_memoized=is_memoized).run()

    one, other = run(True), run(False)
    assert one.makespan == other.makespan
    assert one.waits == other.waits
    assert [(r.start, r.inside.ends) for r in one.runs] == [
        (r.start, r.inside.ends) for r in other.runs
    ]


@pytest.fixture(scope="module")
def pipeline() -> Simulated:
    compiled = Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 4}).compiled()
    return simulate(compiled, PROFILES["v100"], TWO_HOSTS)


def test_compute_communication_and_bubble_add_up_to_the_step(pipeline: Simulated) -> None:
    for device in pipeline.devices:
        shares = (pipeline.compute_secs, pipeline.communication_secs, pipeline.bubble_secs)
        assert sum(share[device] for share in shares) == pytest.approx(pipeline.secs, rel=ROUNDING)
        assert min(share[device] for share in shares) >= 0


def test_a_device_does_one_thing_at_a_time(pipeline: Simulated) -> None:
    spans: dict[int, list[tuple[int, int]]] = {}
    for ran in pipeline.timeline.runs:
        for work_event, start, end in ran.inside.spans:
            for device in work_event.devices:
                spans.setdefault(device, []).append((ran.start + start, ran.start + end))
    for mine in spans.values():
        assert all(a[1] <= b[0] for a, b in pairwise(mine))


def test_runs_of_equal_microbatches_are_simulated_once() -> None:
    compiled = pipelined(8, 8, one_f_one_b(8, 100), free(8))
    found = simulate(compiled, given(compiled.plan.graph, 1e-3, 2e-3))
    assert found.secs == pytest.approx((100 + 7) * 3e-3, rel=ROUNDING)
    # Every stage has a forward, a first backward and later backwards. Two runs are around them.
    assert len({id(ran.inside) for ran in found.timeline.runs}) == 3 * 8 + 2


# --- files --------------------------------------------------------------------------------------


def test_table_fits_in_100_columns(pipeline: Simulated) -> None:
    text = str(pipeline)
    assert max(map(len, text.splitlines())) <= 100
    assert "bubble of makespan" in text
    assert "shares reached, by size" in text


def test_trace_has_the_computing_time_of_every_device(pipeline: Simulated, tmp_path: Path) -> None:
    pipeline.save_trace(tmp_path / "trace.json")
    values = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert values == json.loads(json.dumps(list(events(pipeline))))
    for device in pipeline.devices:
        computing = sum(
            value["dur"]
            for value in values
            if value["pid"] == device and value.get("cat") == "compute"
        )
        assert computing * 1e-6 == pytest.approx(pipeline.compute_secs[device], rel=1e-6)
    assert {value["ph"] for value in values} == {"X", "C", "M"}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_written(pipeline: Simulated, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    pipeline.draw(tmp_path / f"step{suffix}")
    assert (tmp_path / f"step{suffix}").stat().st_size > 5000


def test_unknown_picture_format_is_rejected(pipeline: Simulated, tmp_path: Path) -> None:
    with pytest.raises(ss.PlanError, match=r"use a name in \.png, \.svg or \.pdf"):
        pipeline.draw(tmp_path / "step.gif")


# --- errors -------------------------------------------------------------------------------------


def test_error_for_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ss.PlanError, match="there is no profile 'v10'; there are v100, a100, h100"):
        simulate(cut_in_batch(2, free(2)), "v10")


def test_error_for_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(
        ss.PlanError, match="there is no communication 'mpi'; there are rvd, ring, p2p"
    ):
        simulate(cut_in_batch(2, free(2)), "v100", intra="mpi")


def test_topology_that_lacks_devices_of_the_plan_is_rejected() -> None:
    with pytest.raises(ss.PlanError, match=r"devices \[2, 3\] are not in the topology"):
        simulate(cut_in_batch(4, free(4)), "v100", free(2))
