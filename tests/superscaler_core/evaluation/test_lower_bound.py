"""The lower bound of a step: no plan is faster, of any planner and any options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import Reach
from superscaler_core.evaluation import LowerBound, Request
from superscaler_core.evaluation.least_recomputed import Room, least_recomputed, saved_values
from superscaler_core.models import build, example_inputs
from superscaler_core.simulator import PROFILES, simulate
from tests.superscaler_core.cases import Case

HOST = rv.Topology.single_host(4, 5e-6, 120e9)
SIZES = {"layers": 2, "width": 64, "sequence": 32, "heads": 4}


def gpt(samples: int) -> ss.Graph:
    return ss.capture(build("gpt", **SIZES), example_inputs("gpt", samples, **SIZES))


def request(**changes: object) -> Request:
    asked = Request(gpt, (1, 2, 4), 8, (0, 1, 2, 3), HOST, PROFILES["v100"], 1 << 34)
    return replace(asked, **changes)


def asked_of(compiled: ss.Compiled, profile: str, recycle: int | None = None) -> Request:
    """The request of which a program is one answer."""
    graph, plan = compiled.plan.graph, compiled.plan
    samples = graph.batch_inputs[0].shape[0]
    passes = plan.num_recycling_passes // plan.num_microbatches
    return Request(
        lambda _: graph, (samples,), samples * plan.num_microbatches, plan.devices, HOST,
        PROFILES[profile], 1 << 34, optimizer=compiled.optimizer, precision=compiled.precision,
        recycle=passes if recycle is None else recycle,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("data_parallel", {}),
        ("zero3", {}),
        ("megatron", {}),
        ("hybrid", {"tp": 2, "pp": 2, "microbatches": 4}),
        ("hybrid", {"pp": 2, "microbatches": 2, "keep": "block_inputs"}),
        ("recompute", {}),
        ("zero3_offload", {}),
        ("nf1b", {"microbatches": 3, "recycle": 1}),
    ],
)
@pytest.mark.parametrize("profile", ["v100", "h100", "a100-eager"])
def test_no_shipped_plan_is_faster(name: str, options: dict[str, object], profile: str) -> None:
    model = "evoformer" if name == "nf1b" else "gpt"
    compiled = Case(name, 2 if name == "nf1b" else 4, options, model=model).compiled()
    bound = LowerBound(asked_of(compiled, profile))
    assert 0 < bound.secs <= simulate(compiled, profile, HOST).secs


def test_no_plan_is_faster_with_no_more_memory_than_it_takes() -> None:
    """Weights that are not trained, and functions that save nothing, need no room."""
    for model in (_Frozen(), _Doubled()):
        inputs = torch.zeros(1, 4096, 8)
        plan = ss.Plan(ss.capture(model, (inputs,)), devices=[0])
        for op in plan.graph.ops:
            plan.op_assign(op, 0)
        compiled = ss.compile(plan, optimizer="sgd")
        found = simulate(compiled, "v100", HOST)
        asked = replace(asked_of(compiled, "v100"), memory_bytes=max(found.peak_bytes.values()))
        assert LowerBound(asked).secs <= found.secs


@pytest.mark.parametrize("keep", ["everything", "attention_only", "block_inputs"])
def test_plans_that_recompute_are_not_faster_than_their_memory_allows(keep: str) -> None:
    sizes = {"layers": 4, "width": 32, "sequence": 256, "heads": 4, "fused": False}
    compiled = Case("hybrid", 1, {"microbatches": 1, "keep": keep}, sizes=sizes).compiled()
    found = simulate(compiled, "v100", HOST)
    peak = max(found.peak_bytes.values())
    least = [
        LowerBound(replace(asked_of(compiled, "v100"), memory_bytes=room)).secs
        for room in (2 * peak, peak, peak // 4)
    ]
    assert least == sorted(least)
    assert least[1] <= found.secs


class _Frozen(nn.Module):
    """A trained map, then maps that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.rest = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.rest.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x)).sum()


@ss.register_op("b s h -> b s h")
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A function that states nothing of what it saves."""
    return x * 2


class _Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(8):
            x = doubled(x)
        return x.sum()


@pytest.mark.parametrize("planner", ["auto", "by_hand", "tofu", "pipedream"])
def test_no_trial_of_a_search_is_faster(planner: str) -> None:
    found = ss.search(
        gpt, topology=HOST, batch=8, samples=(1, 2, 4), planner=planner, profile="v100",
        budget_secs=20, max_tried=24, num_processes=1,
    )  # fmt: skip
    least = min(trial.secs for trial in found.tried if trial.fits)
    assert 0 < found.bound.secs <= least
    assert found.gap == pytest.approx(found.secs / found.bound.secs)
    assert f"{found.gap:.3f} x" in found.summary()


def test_measured_times_have_no_bound() -> None:
    profile = replace(PROFILES["v100"], op_secs={"x": (1.0, 1.0)})
    bound = LowerBound(request(profile=profile))
    assert bound.secs == 0
    assert "none" in bound.certificate(1.0)


def test_shares_that_fall_have_no_bound() -> None:
    cached = Reach(((1e5, 0.9), (1e8, 0.3)))
    bound = LowerBound(request(profile=replace(PROFILES["v100"], memory=cached)))
    assert bound.secs == 0
    assert "fall" in bound.certificate(1.0)


def test_parts_add_up_and_more_work_is_never_faster() -> None:
    bare, adam = LowerBound(request(optimizer="sgd")), LowerBound(request())
    assert bare.secs == pytest.approx(sum(bare.parts.values()))
    assert bare.secs < sum(bare.parts.values())  # rounding never makes it the larger
    assert bare.secs < adam.secs
    assert LowerBound(request(batch=16)).computing_secs == pytest.approx(2 * bare.computing_secs)
    fewer = LowerBound(request(devices=(0, 1)))
    assert fewer.secs == pytest.approx(2 * adam.secs)


def test_recycled_passes_are_in_the_bound() -> None:
    compiled = Case("nf1b", 2, {"microbatches": 3, "recycle": 1}, model="evoformer").compiled()
    once, twice = (asked_of(compiled, "v100", recycle=num) for num in (0, 2))
    assert LowerBound(once).computing_secs < LowerBound(twice).computing_secs


# --- memory -------------------------------------------------------------------------------------


class _Chain(nn.Module):
    """Maps with an activation between them, each of which autograd saves its input."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for line in self.lines:
            x = line(x).tanh()
        return x.sum()


def test_values_that_only_the_next_layer_saves_are_not_counted_for_the_last() -> None:
    """Four maps save their inputs: the batch, and the results of all maps but the last."""
    lines = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    graph = ss.capture(_Summed(lines), (torch.zeros(2, 8),))
    need = sum(saved_values(graph).values())
    assert need == 3 * 2 * 8 * 4
    nearly = least_recomputed(graph, 1, each_costs(1.0), 10.0, Room(0.999 * need, 1e-9))
    assert 10.0 < nearly < 10.01


class _Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


def each_costs(secs: float) -> Callable[[object], float]:
    return lambda op: secs


@pytest.mark.parametrize("num", [2, 4])
def test_memory_for_a_share_of_the_values_makes_the_rest_be_computed_again(num: int) -> None:
    graph = ss.capture(_Chain(num), (torch.zeros(2, 8),))
    saved = saved_values(graph)
    need = sum(saved.values())
    assert need == num * 2 * 8 * 4  # tanh saves its result, which the next map reads
    slow = Room(need, 1e-9)
    assert least_recomputed(graph, 1, each_costs(1.0), 10.0, slow) == 10.0
    # Without a value in memory, all maps and all activations run again.
    nothing = least_recomputed(graph, 1, each_costs(1.0), 10.0, Room(1e-9, 1e-9))
    assert nothing == pytest.approx(10.0 + 2 * num)
    half = least_recomputed(graph, 1, each_costs(1.0), 10.0, Room(need / 2, 1e-9))
    assert 10.0 < half < nothing


def test_copies_to_hosts_take_time_beside_computing() -> None:
    graph = ss.capture(_Chain(4), (torch.zeros(2, 8),))
    need = sum(saved_values(graph).values())
    fast = least_recomputed(graph, 1, each_costs(1.0), 10.0, Room(1e-9, need))
    assert fast == pytest.approx(10.0)  # there and back takes two seconds
    slow = least_recomputed(graph, 1, each_costs(1.0), 10.0, Room(1e-9, need / 6))
    assert 10.0 < slow < 12.0


def test_samples_of_a_microbatch_may_run_one_after_another() -> None:
    graph = ss.capture(_Chain(4), (torch.zeros(2, 8),))
    need = sum(saved_values(graph).values())
    assert least_recomputed(graph, 2, each_costs(1.0), 10.0, Room(need / 2, 1e-9)) == 10.0


class WithToken(nn.Module):
    """A constant token before the sequence: over one sample, spreading it is no op."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.last(whole).square().mean()


def test_an_op_that_one_sample_lacks_adds_nothing() -> None:
    def graph_of(samples: int) -> ss.Graph:
        return ss.capture(WithToken(), (torch.zeros(samples, 8, 16),))

    assert len(graph_of(1).ops) < len(graph_of(2).ops)
    both = LowerBound(request(graph_of=graph_of))
    assert both.secs > 0
    with_all = LowerBound(request(graph_of=graph_of, samples=(2, 4)))
    assert both.computing_secs == pytest.approx(with_all.computing_secs, rel=0.05)
