"""Priced spaces: their sums equal those of the cost functions, and their plans run."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES, StageCost
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.space import PricedSpace, brute_force, price_space
from tests.covering import covering
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.cost.choices import ONE_BUCKET, ONE_HOST, TWO_HOSTS, graph
from tests.superscaler_core.space.models import block_on_paper, captured, mlp_on_paper

MICROBATCHES = 3


def priced(model: ss.Graph, mesh: tuple[int, ...] = (2, 2), **options: Any) -> PricedSpace:
    costs = ss.CostModel(model, PROFILES["a100"], options.pop("topology", TWO_HOSTS))
    return price_space(costs, range(4), mesh=mesh, **{"microbatches": MICROBATCHES} | options)


def some(space: PricedSpace, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(node.num_choices) for node in space.space.nodes]


def stage_of(space: PricedSpace, assignment: list[int]) -> StageCost:
    ops, splits = space.costs.graph.ops, space.splits(assignment)
    return space.costs.stage_cost(
        ops, space.devices, splits, storage=space.storage(assignment)
    )  # fmt: skip


def latency_secs(stage: StageCost) -> float:
    """Latency of the two calls that move all weights, which a space omits."""
    return sum(max((c.latency_secs for c in calls), default=0.0)
               for calls in (stage.fetch, stage.reduce))  # fmt: skip


# --- sums ---------------------------------------------------------------------------------------


@covering(model=["plain", "mlp"], mesh=[(4,), (2, 2)], pieces=[False, True])
def test_time_of_a_chain_equals_its_stage_cost(
    model: str, mesh: tuple[int, ...], pieces: bool
) -> None:
    space = priced(graph(model), mesh, pieces=pieces)
    every = [some(space, seed) for seed in range(10)]
    stages = [stage_of(space, assignment) for assignment in every]
    secs = [space.space.secs(a) + latency_secs(s) for a, s in zip(every, stages, strict=True)]
    assert secs == pytest.approx([s.step_secs(MICROBATCHES) for s in stages], rel=1e-9)


@pytest.mark.parametrize("model, seed", [("gpt", 0), ("gpt of many kernels", 1)])
def test_time_with_residuals_is_at_most_ten_percent_above_the_stage_cost(
    model: str, seed: int
) -> None:
    space = priced(graph(model), (4,), topology=ONE_HOST)
    assignment = some(space, seed)
    stage = stage_of(space, assignment)
    secs = space.space.secs(assignment) + latency_secs(stage)
    exact = stage.step_secs(MICROBATCHES)
    assert exact * (1 - 1e-9) <= secs <= 1.1 * exact


@pytest.mark.parametrize(
    "model, options",
    [
        ("gpt", {}),
        ("mlp", {"pieces": True}),
        ("gpt", {"keep": ss.Keep.BLOCK_INPUTS}),
        ("mlp", {"recompute_regions": True}),
        ("gpt", {"recompute_regions": True}),
    ],
    ids=str,
)
def test_a_filled_plan_takes_the_time_and_memory_of_its_assignment(
    model: str, options: dict[str, Any]
) -> None:
    space = priced(graph(model), **options)
    assignment = some(space, 1)
    plan = ss.Plan(space.costs.graph, range(4))
    space.fill(plan, assignment)
    plan.overlap = ONE_BUCKET
    program = ss.compile(plan, topology=TWO_HOSTS, optimizer="adam")
    simulated = ss.simulate(program, "a100").secs
    stage = stage_of(space, assignment)
    secs = space.space.secs(assignment) + latency_secs(stage)
    secs += space.costs.loss_secs(space.splits(assignment)[plan.graph.ops[-1]])
    assert secs == pytest.approx(simulated, rel=0.05)
    most = max(
        each.weights_bytes + each.grads_bytes + each.optimizer_bytes + each.activations_bytes
        for each in program.memory.values()
    )
    assert 0.99 * most <= space.space.bytes(assignment) <= 1.4 * most


# --- blocks -------------------------------------------------------------------------------------


def test_equal_blocks_share_the_nodes_of_one_block() -> None:
    two, five = (priced(captured("gpt", layers=num), (4,)) for num in (2, 5))
    assert [n.name for n in five.space.nodes] == [n.name for n in two.space.nodes]
    assert sorted({n.count for n in five.space.nodes}) == [1, 5]
    assert len(five.space.edges) == len(two.space.edges)


def test_equal_choices_in_separate_blocks_cost_the_same_as_shared_blocks() -> None:
    same, free = (priced(captured("gpt", layers=3), (4,), same_blocks=x) for x in (True, False))
    assert len(free.space.nodes) > len(same.space.nodes)
    for seed in range(5):
        assignment = some(same, seed)
        splits = same.splits(assignment)
        also = [
            next(
                i
                for i, x in enumerate(choices)
                if x.split_of(group) == {op: splits[op] for op in group}
            )
            for (group,), choices in zip(free.groups, free.choices, strict=True)
        ]
        assert free.space.secs(also) == pytest.approx(same.space.secs(assignment), rel=1e-12)
        assert free.space.bytes(also) == same.space.bytes(assignment)


def test_space_of_a_run_of_ops_has_only_these_ops() -> None:
    model = captured("gpt")
    space = priced(model, (4,), ops=model.ops[:20])
    assert sorted(space.splits(some(space, 0)), key=lambda op: op.index) == [*model.ops[:20]]


# --- plans --------------------------------------------------------------------------------------

KNOBS = {
    "cut": {},
    "pieces": {"pieces": True},
    "rerun": {"recompute_regions": True},
    "blocks": {"keep": ss.Keep.BLOCK_INPUTS},
}


@pytest.mark.parametrize(
    ("model", "options"), [("mlp", "rerun"), ("gpt", "blocks"), ("moe", "pieces")]
)
def test_a_filled_plan_trains_as_one_device(model: str, options: str, tmp_path: Path) -> None:
    case = Case("filled", 4, model=model)
    space = priced(captured(model), microbatches=2, **KNOBS[options])
    plan = ss.Plan(space.costs.graph, range(4))
    space.fill(plan, some(space, 3))
    assert plan.num_microbatches == 2
    compiled = ss.compile(plan, topology=TWO_HOSTS)
    check_trains(case, tmp_path, 1e-9, compiled=compiled)


def test_vocabulary_that_cannot_be_cut_evenly_is_cut_nearly_evenly(tmp_path: Path) -> None:
    """67 words are cut into 16, 17, 17 and 17, and training is that of one device."""
    case = Case("filled", 4, model="gpt", sizes={"vocabulary": 67})
    space = priced(captured("gpt", vocabulary=67), microbatches=2)
    assignment = [0] * len(space.choices)
    for op, loop in (("embed:embedding", "v"), ("head:linear", "n")):
        node = space.node_of[op]
        (assignment[node],) = [
            number
            for number, choice in enumerate(space.choices[node])
            if set(choice.name.split()) == {f"{loop}/2"}
        ]
    plan = ss.Plan(space.costs.graph, range(4))
    space.fill(plan, assignment)
    head = plan.op_split(plan.op("head:linear")).parts
    assert [end - start for part in head for _, start, end in part.pieces] == [16, 17, 17, 17]
    compiled = ss.compile(plan, topology=TWO_HOSTS)
    check_trains(case, tmp_path, 1e-9, compiled=compiled)


def test_a_plan_of_another_graph_is_not_filled() -> None:
    space = priced(captured("mlp"), (4,))
    with pytest.raises(ss.PlanError, match="the plan is of another graph"):
        space.fill(ss.Plan(captured("gpt"), range(4)), some(space, 0))


def test_explain_lists_all_choices_of_an_op_and_marks_the_chosen_one() -> None:
    space = priced(captured("gpt"), (4,))
    assignment = some(space, 0)
    head, *rows = space.explain(assignment, "layers.1.mlp.up:linear").splitlines()
    assert head == (
        "layers.1.mlp.up:linear is decided with 0 ops of its group and those of 1 blocks like its "
        "own"
    )
    assert max(map(len, rows)) <= 100
    node = space.node_of["layers.1.mlp.up:linear"]
    names = [choice.name for choice in space.choices[node]]
    assert [row.removeprefix("*").split()[0] for row in rows[1:]] == names
    assert [row.startswith("*") for row in rows[1:]].index(True) == assignment[node]


def test_invalid_options_of_a_space_raise_plan_error() -> None:
    with pytest.raises(ss.PlanError, match="a mesh of 2 x 3 has 6 devices, but 4 were given"):
        priced(captured("mlp"), (2, 3))
    with pytest.raises(ss.PlanError, match="keep=block_inputs, recompute_regions=True"):
        priced(captured("mlp"), keep=ss.Keep.BLOCK_INPUTS, recompute_regions=True)
    space = priced(captured("mlp"), (4,))
    with pytest.raises(ss.PlanError, match="has no op nothing"):
        space.explain([0] * len(space.choices), "nothing")


# --- best assignments ---------------------------------------------------------------------------


def best_of(model: ss.Graph, **options: Any) -> dict[str, str]:
    """For each op, the loop that the best assignment cuts, on four devices of one host."""
    topology = rv.Topology.single_host(4, 5e-6, 130e9)
    space = price_space(ss.CostModel(model, PROFILES["v100"], topology), range(4), **options)
    found = alpa_intra(space.space)
    if space.space.num_assignments < 5000:
        assert found.secs == pytest.approx(brute_force(space.space).secs, rel=1e-9)
    splits = space.splits(found.assignment)
    return {op.name: "".join(i for i, _, _ in x.parts[0].pieces) for op, x in splits.items()}


def test_mlp_with_a_small_batch_is_cut_as_by_megatron() -> None:
    found = best_of(mlp_on_paper(batch=64, width=4096, hidden=16384))
    assert (found["layers.0:linear"], found["layers.1:linear"]) == ("n", "k")


def test_mlp_with_a_large_batch_is_data_parallel() -> None:
    found = best_of(mlp_on_paper(batch=65536, width=512, hidden=2048))
    assert set(found.values()) == {"b"}


def test_transformer_block_with_a_small_batch_is_cut_as_by_megatron() -> None:
    found = best_of(block_on_paper(batch=1, tokens=256, width=4096, heads=32))
    assert found["block.attn:attention"] == "h"
    cut = {name: found[f"block.{name}:linear"] for name in ("attn.q", "attn.out", "mlp.up")}
    assert cut == {"attn.q": "n", "attn.out": "k", "mlp.up": "n"}
    assert found["block.mlp.down:linear"] == "k"


def test_expert_layers_are_cut_by_expert() -> None:
    sizes = {"sequence": 64, "width": 256, "heads": 4, "experts": 8, "vocabulary": 512}
    found = best_of(captured("moe", 16, "float32", **sizes))
    experts = {choice for op, choice in found.items() if "experts:einsum" in op}
    assert experts == {"e"}
    assert found["layers.1.attn.q:linear"] == "b"
