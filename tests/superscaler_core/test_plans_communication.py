"""Laws of what sPrograms communicate: no more than the plan's name promises, each at its bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.plans import PLANS
from superscaler_core.tensor import PTensor
from tests.superscaler_core.training import Case

NUM = 4
# Nothing is cheaper than bytes: the limit of large tensors.
LARGE = rv.Topology.single_host(8, alpha_secs=1e-12, bytes_per_sec=1e9)

MLP = {"inputs": 8, "hidden": 16, "outputs": 8, "layers": 3}
"""All sizes are multiples of the devices, so that volumes are exact."""


def moves(transfers: Iterable[Transfer]) -> list[rv.Plan]:
    """The plans of what moves; what is at its place needs none."""
    return [t.plan(LARGE) for t in transfers if not t.is_idle]


def kinds(transfers: Iterable[Transfer]) -> Counter[str]:
    """How often each primitive moves a tensor; scalars, which are nothing, are left out."""
    large = [t for t in transfers if t.box.num_elements > 1]
    return Counter(step.kind for plan in moves(large) for step in plan.path.steps)


def forward(compiled: Compiled) -> list[Transfer]:
    """What a microbatch's forward moves."""
    return [t for edge in compiled.materialized.edges.all for t in edge.forward]


def backward(compiled: Compiled) -> list[Transfer]:
    """What a microbatch's backward moves."""
    return [t for edge in compiled.materialized.edges.all for t in edge.backward]


def fetches(compiled: Compiled) -> list[Transfer]:
    """What takes weights to where they are read."""
    return [t for use in compiled.materialized.weights.uses for t in use.fetch]


def reductions(compiled: Compiled) -> list[Transfer]:
    """What takes gradients to where weights are stored."""
    return [t for use in compiled.materialized.weights.uses for t in use.reduce]


def sent_bytes(transfers: Iterable[Transfer]) -> int:
    """Bytes that all devices together send."""
    return sum(plan.cost.wire_bytes for plan in moves(transfers))


def all_reduce_bytes(tensors: Iterable[PTensor]) -> int:
    """Bytes that all devices together send when they all-reduce tensors as rings do."""
    return 2 * (NUM - 1) * sum(tensor.num_bytes for tensor in tensors)


# --- tensor parallel ----------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_megatron_all_reduces_twice_a_layer_each_way_and_nothing_else(layers: int) -> None:
    made = Case("megatron", NUM, sizes={"layers": layers}).compiled()
    assert kinds(forward(made)) == {"all_reduce": 2 * layers}
    assert kinds(backward(made)) == {"all_reduce": 2 * layers}
    assert kinds(fetches(made)) == kinds(reductions(made)) == {}


@pytest.mark.parametrize("layers", [1, 3])
def test_megatron_sp_gathers_and_scatters_twice_a_layer_each_way(layers: int) -> None:
    made = Case("megatron_sp", NUM, sizes={"layers": layers}).compiled()
    pairs = {"all_gather": 2 * layers, "reduce_scatter": 2 * layers}
    assert kinds(forward(made)) == kinds(backward(made)) == pairs
    assert kinds(fetches(made)) == {}


def test_megatron_sp_moves_the_activations_that_megatron_moves() -> None:
    made = [Case(name, NUM).compiled() for name in ("megatron", "megatron_sp")]
    volumes = [sent_bytes([*forward(one), *backward(one)]) for one in made]
    assert volumes[0] == volumes[1] > 0


def test_a_cut_vocabulary_sums_what_is_looked_up_and_swaps_scores_for_tokens() -> None:
    made = Case("megatron", NUM, {"vocabulary": True}, sizes={"layers": 1}).compiled()
    assert kinds(forward(made)) == {"all_reduce": 2 + 1, "all_to_all": 1}
    assert kinds(backward(made)) == {"all_reduce": 2 + 1, "all_to_all": 1}


def test_sequence_parallel_gathers_keys_and_values_of_every_layer() -> None:
    made = Case("sequence_parallel", NUM, sizes={"layers": 3}).compiled()
    assert kinds(forward(made)) == {"all_gather": 2 * 3}
    assert kinds(backward(made)) == {"reduce_scatter": 2 * 3}
    assert sent_bytes(reductions(made)) == all_reduce_bytes(made.plan.graph.parameters.values())


# --- data parallel ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data_parallel", "accumulate", "recompute"])
@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_data_parallel_all_reduces_all_gradients_once_and_nothing_else(
    name: str, model: str
) -> None:
    made = Case(name, NUM, model=model, sizes=MLP if model == "mlp" else {}).compiled()
    assert kinds(forward(made)) == kinds(fetches(made)) == {}
    assert made.plan.windows == ()  # so gradients are reduced at the end of a step
    # What looks up positions has no batch: there its output's gradient is reduced, which is as
    # large as the weight's.
    volume = sent_bytes([*backward(made), *reductions(made)])
    assert volume == all_reduce_bytes(made.plan.graph.parameters.values())
    assert set(kinds([*backward(made), *reductions(made)])) == {"all_reduce"}


def test_recompute_keeps_less_and_moves_no_more() -> None:
    kept, again = (
        Case(name, NUM, sizes={"layers": 4}).compiled() for name in ("data_parallel", "recompute")
    )
    assert backward(again) == backward(kept)
    assert again.memory[0].activations_bytes < kept.memory[0].activations_bytes / 2


@pytest.mark.parametrize(
    ("name", "gathers", "share"), [("zero1", 1, 1.0), ("zero2", 1, 1.0), ("zero3", 2, 1.5)]
)
def test_zero_moves_what_the_paper_says_relative_to_an_all_reduce(
    name: str, gathers: int, share: float
) -> None:
    made = Case(name, NUM, model="mlp", sizes=MLP).compiled()
    weights = made.plan.graph.parameters.values()
    assert kinds(fetches(made)) == {"all_gather": len(weights)}
    assert kinds(reductions(made)) == {"reduce_scatter": len(weights)}
    assert kinds([*forward(made), *backward(made)]) == {}
    # Weights come once a step, or under ZeRO 3 for every window's forward and backward.
    text = made.files[0]
    windows = {use.window for use in made.materialized.weights.uses if use.is_fetched}
    assert text.count("run.gather(") == gathers * len(windows)
    volume = gathers * sent_bytes(fetches(made)) + sent_bytes(reductions(made))
    assert volume == share * all_reduce_bytes(weights)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_stores_every_element_on_one_device(name: str) -> None:
    made = Case(name, NUM, model="mlp", sizes=MLP).compiled()
    for tensor, side in made.materialized.weights.storage.items():
        volumes = [shard.box.num_elements for shard in side.shards.values()]
        assert volumes == [tensor.box.num_elements // NUM] * NUM


def test_stages_store_what_their_devices_share_in_pieces() -> None:
    knobs = {"tp": 2, "pp": 2, "zero1": True}
    made = Case("hybrid", 8, knobs, sizes={"layers": 2}).compiled()
    storage = made.materialized.weights.storage
    cut = storage[made.plan.graph.parameter("layers.1.mlp.up.weight")]
    shared = storage[made.plan.graph.parameter("layers.1.norm2.weight")]
    assert sorted(cut.shards) == sorted(shared.shards) == [4, 5, 6, 7]
    assert {shard.box.shape for shard in cut.shards.values()} == {(16, 16)}
    assert {shard.box.shape for shard in shared.shards.values()} == {(4,)}


# --- experts and stages -------------------------------------------------------------------------


def test_expert_parallel_has_two_all_to_alls_a_layer_of_experts_each_way() -> None:
    made = Case("expert_parallel", NUM, model="moe", sizes={"layers": 6}).compiled()
    assert kinds(forward(made)) == {"all_to_all": 2 * 3}
    assert kinds(backward(made))["all_to_all"] == 2 * 3
    assert set(kinds(backward(made))) <= {"all_to_all", "all_reduce"}  # see data parallel
    experts = made.plan.graph.parameter("layers.1.moe.experts.up")
    assert {s.box.shape for s in made.materialized.weights.storage[experts].shards.values()} == {
        (1, 16, 64)
    }


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved"])
def test_pipelines_send_one_hidden_state_between_stages_each_way(name: str) -> None:
    made = Case(name, 2, sizes={"layers": 4}).compiled()
    num_stages = 4 if name == "interleaved" else 2
    assert made.plan.num_stages == num_stages
    assert kinds(forward(made)) == kinds(backward(made)) == {"transfer": num_stages - 1}
    hidden = 4 * 8 * 16 * 8  # batch, sequence, width, bytes of a float64
    assert sent_bytes(forward(made)) == (num_stages - 1) * hidden
    assert kinds(reductions(made)) == {}


# --- bounds -------------------------------------------------------------------------------------


LIMIT = [
    *(
        Case(name, NUM, sizes={"layers": 8 if name == "interleaved" else 4})
        for name in PLANS
        if name != "expert_parallel"
    ),
    Case("expert_parallel", NUM, model="moe"),
    *(Case(name, NUM, model="moe") for name in ("megatron", "megatron_sp", "sequence_parallel")),
    *(Case(name, NUM, model="wide_resnet", sizes={"classes": 8}) for name in ("megatron", "zero3")),
    Case("hybrid", 8, {"tp": 2, "pp": 2, "zero1": True, "sequence": True, "vocabulary": True}),
    Case("hybrid", 8, {"tp": 4, "sequence": True, "recompute": True}, model="moe", batch=8),
]


@pytest.mark.parametrize("case", LIMIT, ids=str)
def test_no_tensor_takes_longer_than_its_bound(case: Case) -> None:
    made = case.compiled()
    every = [*forward(made), *backward(made), *fetches(made), *reductions(made)]
    # A scalar cannot be cut, so a sum of scalars is not at a bound that counts bytes alone.
    plans = moves(t for t in every if t.box.num_elements > 1)
    # Some microseconds of latency are left in the smallest tensors: alpha is not quite zero.
    assert max(plan.gap for plan in plans) <= 1.001
