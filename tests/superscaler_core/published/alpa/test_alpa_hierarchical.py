"""Alpa's two levels on a small GPT: priced, planned, simulated, and trained as on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf
from pathlib import Path

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES
from superscaler_core.evaluation import FULL, Request
from superscaler_core.evaluation.evaluate import evaluate
from superscaler_core.models import GPT, GPTConfig
from superscaler_core.published.alpa import (
    MeshCut,
    StagePrices,
    alpa_hierarchical,
    meshes_of,
    price_ways,
    propose_alpa,
)
from superscaler_core.published.alpa.alpa_hierarchical import clusters_of
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.published.alpa.assignments import assignments
from superscaler_core.published.stages.pricing import layers_of
from superscaler_core.space import Core, Space, price_space
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.simulated_chains import chain

HOSTS = rv.Topology.hosts(
    [range(2), range(2, 4)], intra=rv.Link(5e-6, 100e9), inter=rv.Link(20e-6, 10e9)
)
MICROBATCHES = 4
BOTH = (ss.Keep.EVERYTHING, ss.Keep.BLOCK_INPUTS)


@cache
def gpt() -> ss.Graph:
    """A model of four blocks, with microbatches of eight samples."""
    sizes = GPTConfig(vocabulary=512, sequence=64, layers=4, width=128, heads=4)
    with torch.device("meta"):
        tokens = torch.empty(8, 64, dtype=torch.int64)
        return ss.capture(GPT(sizes), (tokens, tokens))


def costs(graph: ss.Graph) -> ss.CostModel:
    return ss.CostModel(graph, PROFILES["a100"], HOSTS)


@cache
def prices() -> tuple[StagePrices, ...]:
    return price_ways(
        costs(gpt()), range(4), [(1,), (2,), (4,)], MICROBATCHES,
        memory_bytes=20 << 20,
    )  # fmt: skip


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, end", [(0, 2), (1, 3), (3, 4)])
def test_run_of_layers_costs_the_same_as_the_space_of_its_ops(first: int, end: int) -> None:
    runs = prices()[1].runs
    space, _ = runs.space(first, end)
    ops = [op for layer in layers_of(ss.find_blocks(gpt()))[first:end] for op in layer]
    alone = price_space(costs(gpt()), range(2), mesh=(2,), microbatches=MICROBATCHES, ops=ops).space
    some = tuple(node.num_choices - 1 for node in space.nodes)
    assert [node.count for node in space.nodes] == [node.count for node in alone.nodes]
    # The first node of a space includes the launch time of its segment. A run that starts later
    # has no such node.
    launches = 2 * MICROBATCHES * PROFILES["a100"].segment_secs * (first > 0)
    assert space.secs(some) + launches == pytest.approx(alone.secs(some), rel=1e-9)


def test_clusters_minimize_the_longest_run() -> None:
    secs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    ends = (0, *clusters_of(secs, 3))
    cuts = [(0, *inner, 7) for inner in combinations(range(1, 7), 2)]
    longest = [max(sum(secs[a:b]) for a, b in pairwise(cut)) for cut in cuts]
    assert max(sum(secs[a:b]) for a, b in pairwise(ends)) == min(longest)


ALL_RUNS = tuple(combinations(range(5), 2))


@pytest.mark.parametrize("number", range(3))
def test_joint_solution_of_runs_equals_the_solution_of_each_run(number: int) -> None:
    runs = prices()[number].runs
    together = assignments(runs, ALL_RUNS, in_flight=2)
    for run, found in zip(ALL_RUNS, together, strict=True):
        space, nodes = runs.space(*run)
        times = [space.secs(choices[list(nodes)].tolist()) for _, choices in found]
        assert [secs for secs, _ in found] == pytest.approx(times, rel=1e-12)
        free = Space(space.nodes, space.edges, space.microbatches)
        assert times[0] == pytest.approx(alpa_intra(free).secs, rel=1e-12)
        assert len({tuple(choices) for _, choices in found}) == len(found)


def test_runs_have_the_same_times_if_elimination_does_not_solve_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, wanted = prices()[1].runs, ALL_RUNS[:3]
    together = [found[0][0] for found in assignments(runs, wanted, in_flight=2)]
    monkeypatch.setattr(Core, "eliminate", lambda core: None)
    alone = [found[0][0] for found in assignments(runs, wanted, in_flight=2)]
    # The tolerance is that of the solver HiGHS.
    assert alone == pytest.approx(together, rel=1e-6)


def test_short_memory_adds_slower_assignments_that_need_less_memory() -> None:
    """The other assignments are slower than the fastest one, and some need less memory."""
    mesh = prices()[1]
    ((fastest, *leaner),) = assignments(mesh.runs, [(0, 4)], in_flight=4)
    space, _ = mesh.runs.space(0, 4)
    held = [space.bytes(choices.tolist()) for _, choices in (fastest, *leaner)]
    assert leaner
    assert all(secs > fastest[0] for secs, _ in leaner)
    assert min(held) < held[0]


# --- stages -------------------------------------------------------------------------------------


def least_of_all(memory_bytes: float) -> float:
    """The least objective of all stages, meshes and ways on four devices, by brute force."""
    best = inf
    for count in range(4):
        for inner in combinations(range(1, 4), count):
            stages = list(pairwise((0, *inner, 4)))
            for chosen in product(prices(), repeat=len(stages)):
                if sum(each.num_devices for each in chosen) != 4:
                    continue
                fitting = [
                    [
                        way.secs
                        for way in each.ways(*stage)
                        if way.resting_bytes
                        + min(len(stages) - number, MICROBATCHES) * way.kept_bytes
                        + way.work_bytes
                        <= memory_bytes
                    ]
                    for number, (each, stage) in enumerate(zip(chosen, stages, strict=True))
                ]
                if all(fitting):
                    secs = list(map(min, fitting))
                    best = min(best, sum(secs) + (MICROBATCHES - 1) * max(secs))
    return best


@pytest.mark.parametrize("mib", [1e6, 12, 10, 8, 7])
def test_stages_equal_the_optimum_of_brute_force(mib: float) -> None:
    least = least_of_all(mib * 2**20)
    cut = alpa_hierarchical(prices(), range(4), MICROBATCHES, mib * 2**20)
    assert cut.objective == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("keep", BOTH, ids=str)
def test_predicted_time_of_a_cut_omits_no_more_than_its_communication(keep: ss.Keep) -> None:
    """Alpa's objective has no transfers between stages, and here no others are needed."""
    cut = alpa_hierarchical(prices(), range(4), MICROBATCHES, 1e12, levels=[keep])
    plan = ss.Plan(gpt(), range(4))
    cut(plan)
    made = ss.compile(plan, topology=HOSTS)
    found = ss.simulate(made, "a100")
    assert len(cut.stages) == 4
    assert 0 < found.secs - cut.objective < sum(level.secs for level in found.levels)


def test_two_dim_meshes_of_two_hosts_are_2x8_4x4_and_8x2() -> None:
    assert meshes_of(16, 8)[-3:] == ((2, 8), (4, 4), (8, 2))


def test_hosts_of_any_size_are_submeshes() -> None:
    assert meshes_of(6, 6, 1) == ((1,), (2,), (4,), (6,))
    assert meshes_of(6, 3, 1) == ((1,), (2,), (3,), (6,))


# --- plans --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HierarchicalCase(Case):
    """A GPT whose stages and splits are those of Alpa's planner."""

    plan: str = "alpa_hierarchical"
    num_devices: int = 4
    meshes: tuple[tuple[int, ...], ...] = ((1,), (2,), (4,))
    levels: tuple[ss.Keep, ...] = BOTH

    def cut(self) -> MeshCut:
        ways = price_ways(costs(self._graph()), range(4), self.meshes, 3)
        return alpa_hierarchical(ways, range(4), 3, 1e12, levels=self.levels)

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(4))
        self.cut()(plan)
        return plan


@pytest.mark.parametrize(
    "mesh, level",
    [((1,), ss.Keep.EVERYTHING), ((2,), ss.Keep.BLOCK_INPUTS), ((4,), ss.Keep.EVERYTHING)],
    ids=str,
)
def test_planned_model_trains_as_one_device(
    mesh: tuple[int, ...], level: ss.Keep, tmp_path: Path
) -> None:
    """All stages have the same number of devices; there are four, two, or one of them."""
    case = HierarchicalCase(sizes={"layers": 4}, meshes=(mesh,), levels=(level,))
    # Rounding of float64 over two steps.
    check_trains(case, tmp_path, 1e-9)


def test_proposals_can_be_compiled() -> None:
    host = rv.Topology.single_host(2, 5e-6, 100e9)
    request = Request(lambda _: gpt(), (8,), 32, (0, 1), host, PROFILES["a100"], 12 << 20)
    found = list(propose_alpa(request))
    assert found
    for candidate in found:
        ss.compile(candidate.plan(request), topology=host)


def asked(graph: ss.Graph, samples: tuple[int, ...], mib: int, recycle: int = 0) -> Request:
    """Two devices of one host; steps of 32 samples."""
    host = rv.Topology.single_host(2, 5e-6, 100e9)
    return Request(
        lambda _: graph, samples, 32, (0, 1), host, PROFILES["a100"], mib << 20, recycle=recycle
    )


def test_recycling_turns_are_scheduled_and_priced() -> None:
    graph = chain(4, batch=8, width=256, recycles=True)
    once, twice = (next(iter(propose_alpa(asked(graph, (8,), 1 << 20, n)))) for n in (1, 2))
    assert once.plan(asked(graph, (8,), 1 << 20, 1)).num_recycling_passes == 4
    assert once.guess_secs < twice.guess_secs < 2 * once.guess_secs


def test_estimate_of_a_deep_model_is_near_its_full_simulation() -> None:
    sizes = GPTConfig(vocabulary=512, sequence=64, layers=8, width=128, heads=4)
    with torch.device("meta"):
        tokens = torch.empty(8, 64, dtype=torch.int64)
        graph = ss.capture(GPT(sizes), (tokens, tokens))
    request = replace(asked(graph, (8,), 1 << 20), batch=256)
    cut = next(iter(propose_alpa(request)))
    short, whole = (evaluate(request, cut, how) for how in (cut.quick, FULL))
    assert short.is_estimate
    assert not whole.is_estimate
    assert short.secs == pytest.approx(whole.secs, rel=0.01)
    assert short.peak_bytes == whole.peak_bytes


def test_larger_microbatches_are_not_priced_if_a_smaller_size_does_not_fit() -> None:
    priced = []

    def graph_of(samples: int) -> ss.Graph:
        priced.append(samples)
        return gpt()

    request = replace(asked(gpt(), (2, 4, 8), 1), graph_of=graph_of)
    with pytest.raises(ss.PlanError, match="no stages on 2 devices fit"):
        list(propose_alpa(request))
    # Only the size nearest to one sample per device is priced: once for meshes of two axes, and
    # once for meshes of one axis.
    assert priced == [2, 2]
