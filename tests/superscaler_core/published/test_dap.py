"""Axial and branch parallelism: splits of ops, and communication between modules."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.materialize import Edge
from superscaler_core.models import MODELS, build, config_of
from superscaler_core.plans import PLANS, followed
from tests.superscaler_core.cases import Case
from tests.superscaler_core.plans.test_plans_communication import backward, forward, kinds

EIGHTS = {"sequences": 8, "residues": 16}


def dap(num_devices: int, **options: object) -> ss.Compiled:
    layers = options.pop("layers", 1)
    sizes = {**EIGHTS, "layers": layers}
    return Case("dap", num_devices, options, model="evoformer", sizes=sizes).compiled()


def edges_by(made: ss.Compiled, kind: str) -> list[Edge]:
    """Edges whose forward is one step of a kind."""
    edges = made.materialized.edges.all
    return [edge for edge in edges if kinds(edge.forward) == Counter({kind: 1})]


# --- communication ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices, layers", [(2, 2), (4, 1)])
def test_a_block_has_six_all_to_alls_and_six_all_gathers(num_devices: int, layers: int) -> None:
    """FastFold's counts. After the last block, the alignment moves to the next turn instead."""
    made = dap(num_devices, layers=layers)
    assert kinds(forward(made)) == {"all_to_all": 6 * layers, "all_gather": 6 * layers}
    # Gathers become reduce-scatters. No op reads the alignment of the last block, so that it has no
    # gradient. Recycled tensors have no gradient either.
    assert kinds(backward(made)) == {"all_to_all": 6 * layers - 1, "reduce_scatter": 6 * layers}


def test_all_to_alls_switch_between_row_and_column_splits() -> None:
    edges = edges_by(dap(4), "all_to_all")
    found = {}
    for edge in edges:
        (transfer,) = edge.forward
        cuts = [layout.rvd.d.index(4) for layout in (transfer.src, transfer.dst)]
        found[edge.tensor.name.removeprefix("layers.0.")] = tuple(cuts)
    assert found == {
        "msa_row.add": (1, 2),
        "tri_out.add": (1, 2),
        "tri_in.add": (2, 1),
        "tri_start.add": (1, 2),
        "tri_end.add": (2, 1),
        "msa_transition.add": (2, 1),
    }


def test_dap_stages_change_the_split_and_send_in_one_transfer() -> None:
    """The alignment is split along columns in one stage and along rows in the next one."""
    sizes = {**EIGHTS, "layers": 2}
    made = Case("dap_pipeline", 4, {"microbatches": 2}, model="evoformer", sizes=sizes).compiled()
    # Two transfers go to the second stage, and two to the next turn of the first stage.
    onward = {"all_to_all": 5 * 2, "transfer": 2 + 2, "all_gather": 6 * 2}
    assert kinds(forward(made)) == onward
    assert kinds(backward(made)) == {"all_to_all": 5 * 2, "transfer": 2, "reduce_scatter": 6 * 2}


@pytest.mark.parametrize("num_devices", [2, 4])
def test_every_op_is_split_and_keeps_its_share_of_activations(num_devices: int) -> None:
    alone, cut = dap(1), dap(num_devices)
    for op in cut.plan.graph.ops:
        assert all(part.pieces for part in cut.plan.parts(op)), str(op)
    share = cut.memory[0].activations_bytes / alone.memory[0].activations_bytes
    # The rest is gathered biases and gathered operands.
    assert 1 / num_devices <= share < 1.5 / num_devices


@cache
def study(layers: int) -> ss.Graph:
    """Blocks of the study's first shape, in half precision."""
    sizes = {"layers": layers}
    with torch.device("meta"):
        model = build("evoformer", "128x256", **sizes).half()
        inputs = [x.half() if x.is_floating_point() else x for x in meta_inputs(layers)]
    return ss.capture(model, inputs, recycled=MODELS["evoformer"].recycled)


def meta_inputs(layers: int) -> list[Tensor]:
    """Shapes of one sample of the study."""
    config = config_of("evoformer", "128x256", layers=layers)
    msa = torch.empty(1, config.sequences, config.residues, config.msa_width)
    pair = torch.empty(1, config.residues, config.residues, config.pair_width)
    return [msa, pair, torch.zeros(pair.shape[:3], dtype=torch.int64), msa, pair]


@pytest.mark.parametrize(("num_devices", "measured"), [(1, 4414), (4, 1574)])
def test_estimated_memory_with_recomputation_is_close_to_the_study(
    num_devices: int, measured: int
) -> None:
    """Peaks in MB of 48 blocks: measured by SuperScaler's authors on V100s, estimated here.

    Every block after the first adds the same memory. Torch keeps more than the estimate counts:
    rounded memory blocks and workspaces.
    """
    made = []
    for layers in (1, 2):
        plan = ss.Plan(study(layers), range(num_devices))
        PLANS["dap"](plan, keep=ss.Keep.BLOCK_INPUTS)
        made.append(ss.compile(plan).memory[0])
    # A block keeps its share of its inputs. Its last sum keeps one element of both its operands.
    each = made[1].activations_bytes - made[0].activations_bytes
    assert each == (32 << 20) // num_devices + 2 * 2
    found = made[0].total_bytes + 47 * (made[1].total_bytes - made[0].total_bytes)
    assert 0.9 * measured < found / 2**20 < measured


# --- following a dim ----------------------------------------------------------------------------


def module_loops(graph: ss.Graph, name: str, first: int, then: int) -> dict[str, str]:
    ops = graph.ops_in(name)
    return {op.name.rpartition(":")[2]: loop for op, loop in followed(ops, first, then).items()}


@pytest.mark.parametrize(
    ("module", "first", "then", "loop"),
    [("tri_out", 1, 1, "i"), ("tri_in", 2, 2, "j"), ("outer", 2, 1, "i"), ("outer", 2, 2, "j")],
)
def test_a_product_is_cut_along_the_dim_of_its_result(
    module: str, first: int, then: int, loop: str
) -> None:
    graph = dap(1).plan.graph
    assert module_loops(graph, f"layers.0.{module}", first, then)["einsum"] == loop


def test_a_dim_is_followed_through_heads_and_transpositions() -> None:
    graph = dap(1).plan.graph
    found = module_loops(graph, "layers.0.tri_end", 2, 2)
    # Columns are rows of the transposed pairs, and dim 1 of the scores.
    names = ("transpose", "softmax", "flatten", "transpose_2")
    assert [found[name] for name in names] == ["h", "s", "s", "s"]
    assert len(found) == len({op.name.rpartition(":")[2] for op in graph.ops_in("*.tri_end")})


def test_ops_without_the_followed_dim_are_left_out() -> None:
    graph = dap(1).plan.graph
    (norm,) = graph.ops_in("recycle_msa")
    assert followed([norm], 7, 7) == {}


# --- default cuts and errors --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("dap", 2), r"GPT has no modules \*\.msa_row; the plan is for Evoformers"),
        (Case("dap", 4, {"dp": 3}, model="evoformer"), "dp=3 on 4 devices: .* divide 4"),
        (Case("dap", 6, model="evoformer"),
         r"cut along s of .* into 6: it has 4; use at most as many devices"),
        (Case("dap_pipeline", 3, model="evoformer"), "pp=2 times dp=1 on 3 devices"),
        (Case("branch_parallel", 3, model="evoformer"), "2 branches on 3 devices"),
        (Case("branch_parallel", 2, {"branches": (ss.Modules("*.msa_*"), ss.Modules("h.*"))},
         model="evoformer"), r"no modules h\.\*; say branches="),
    ],
    ids=str,
)  # fmt: skip
def test_infeasible_axial_or_branch_plan_raises_plan_error(case: Case, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        case.compiled()


# --- branches -----------------------------------------------------------------------------------


def branches(**sizes: object) -> ss.Compiled:
    return Case("branch_parallel", 2, model="evoformer", sizes=sizes).compiled()


@pytest.mark.parametrize("outer_last", [False, True])
def test_branches_exchange_pairs_and_alignment_once_a_block(outer_last: bool) -> None:
    made = branches(outer_last=outer_last)
    moved = [e for e in made.materialized.edges.all if e.src.shards.keys() != e.dst.shards.keys()]
    ways = Counter((*e.src.shards, *e.dst.shards) for e in moved)
    # The alignment of each block goes to the pairs, and pairs to the alignment of the next.
    assert ways == {(0, 1): 2, (1, 0): 2}


def test_each_device_stores_the_weights_of_its_branch() -> None:
    storage = branches().materialized.weights.storage
    holders = {tensor.name: set(side.shards) for tensor, side in storage.items()}
    assert {frozenset(h) for n, h in holders.items() if ".msa_" in n} == {frozenset({0})}
    assert {frozenset(h) for n, h in holders.items() if ".tri_" in n or ".outer." in n} == {
        frozenset({1})
    }
    assert [holders["recycle_msa.weight"], holders["head.weight"]] == [{0}, {1}]


@pytest.mark.parametrize("outer_last", [False, True])
def test_branches_of_a_block_are_independent_if_its_outer_product_is_last(outer_last: bool) -> None:
    graph = branches(outer_last=outer_last, layers=1).plan.graph
    made_from: dict[str, set[str]] = {}
    for op in graph.ops:
        sources = set(op.module.split(".")[2:3])
        for tensor in op.inputs:
            sources |= made_from.get(tensor.name, set())
        made_from |= {tensor.name: sources for tensor in op.outputs}
    (product,) = (op for op in graph.ops_in("*.tri_out") if op.kind == "einsum")
    waits_for_alignment = "msa_transition" in made_from[product.outputs[0].name]
    assert waits_for_alignment is not outer_last
