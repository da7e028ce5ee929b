"""Communication of sPrograms: its kinds and its volume, and the lower bound of its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.materialize import Transfer
from superscaler_core.memory import footprints
from superscaler_core.plans import PLANS
from tests.superscaler_core.cases import ASYNCHRONOUS, FOLDED, Case

NUM = 4
# Almost no latency, so that only bytes count: the limit of large tensors.
LARGE = rv.Topology.single_host(8, alpha_secs=1e-12, bytes_per_sec=1e9)

MLP = {"inputs": 8, "hidden": 16, "outputs": 8, "layers": 3}
"""All sizes are multiples of the devices, so that volumes are exact."""

EVEN = {
    "layers": 4, "sequences": 8, "residues": 8, "outer_width": 4, "triangle_width": 8, "bins": 8
}  # fmt: skip
"""The same for an Evoformer."""


def moves(transfers: Iterable[Transfer]) -> list[rv.Plan]:
    """The plans of the transfers that move data."""
    return [t.plan(LARGE) for t in transfers if not t.is_idle]


def kinds(transfers: Iterable[Transfer]) -> Counter[str]:
    """How often each primitive moves a tensor; scalars are left out."""
    large = [t for t in transfers if t.box.num_elements > 1]
    return Counter(step.kind for plan in moves(large) for step in plan.path.steps)


def forward(compiled: ss.Compiled) -> list[Transfer]:
    """The transfers of a microbatch's forward."""
    return [t for edge in compiled.materialized.edges.all for t in edge.forward]


def backward(compiled: ss.Compiled) -> list[Transfer]:
    """The transfers of a microbatch's backward."""
    return [t for edge in compiled.materialized.edges.all for t in edge.backward]


def fetches(compiled: ss.Compiled) -> list[Transfer]:
    """The transfers of weights to the devices that read them."""
    return [t for use in compiled.materialized.weights.uses for t in use.fetch]


def reductions(compiled: ss.Compiled) -> list[Transfer]:
    """The transfers of gradients to the devices that store the weights."""
    return [t for use in compiled.materialized.weights.uses for t in use.reduce]


def sent_bytes(transfers: Iterable[Transfer]) -> int:
    """Bytes that all devices together send."""
    return sum(plan.cost.wire_bytes for plan in moves(transfers))


def all_reduce_bytes(tensors: Iterable[ss.PTensor]) -> int:
    """Bytes that all devices together send when they all-reduce tensors as rings do."""
    return 2 * (NUM - 1) * sum(tensor.num_bytes for tensor in tensors)


# --- tensor parallel ----------------------------------------------------------------------------


def test_megatron_has_only_two_all_reduces_per_layer_and_direction() -> None:
    layers = 3
    made = Case("megatron", NUM, sizes={"layers": layers}).compiled()
    assert kinds(forward(made)) == {"all_reduce": 2 * layers}
    assert kinds(backward(made)) == {"all_reduce": 2 * layers}
    assert kinds(fetches(made)) == kinds(reductions(made)) == {}


def test_megatron_sp_has_two_gathers_and_two_scatters_per_layer_and_direction() -> None:
    layers = 3
    made = Case("megatron_sp", NUM, sizes={"layers": layers}).compiled()
    pairs = {"all_gather": 2 * layers, "reduce_scatter": 2 * layers}
    assert kinds(forward(made)) == kinds(backward(made)) == pairs
    assert kinds(fetches(made)) == {}


def test_megatron_sp_sends_as_many_activation_bytes_as_megatron() -> None:
    made = [Case(name, NUM).compiled() for name in ("megatron", "megatron_sp")]
    # Scalars are left out: megatron_sp also adds up the numbers of labels of all devices.
    volumes = [
        sent_bytes(
            [
                sub_transfer
                for sub_transfer in (*forward(one), *backward(one))
                if sub_transfer.src.shape
            ]
        )
        for one in made
    ]
    assert volumes[0] == volumes[1] > 0


def test_vocabulary_split_adds_one_all_reduce_and_one_all_to_all() -> None:
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
def test_data_parallel_only_all_reduces_every_gradient_once(name: str, model: str) -> None:
    made = Case(name, NUM, model=model, sizes=MLP if model == "mlp" else {}).compiled()
    assert kinds(forward(made)) == kinds(fetches(made)) == {}
    assert made.plan.fsdp_units == ()  # so gradients are reduced at the end of a step
    # The look-up of positions has no batch. The gradient of its output is reduced instead, which is
    # as large as that of the weight.
    volume = sent_bytes([*backward(made), *reductions(made)])
    assert volume == all_reduce_bytes(made.plan.graph.parameters.values())
    assert set(kinds([*backward(made), *reductions(made)])) == {"all_reduce"}


def test_recompute_halves_activations_and_moves_no_more() -> None:
    kept, again = (
        Case(name, NUM, sizes={"layers": 4}).compiled() for name in ("data_parallel", "recompute")
    )
    assert backward(again) == backward(kept)
    kept_bytes, again_bytes = (
        footprints(made.materialized, 0)["F", 0].kept.activations for made in (kept, again)
    )
    assert again_bytes < kept_bytes / 2


@pytest.mark.parametrize(
    ("name", "gathers", "share"), [("zero1", 1, 1.0), ("zero2", 1, 1.0), ("zero3", 2, 1.5)]
)
def test_zero_has_the_communication_volume_of_the_paper(
    name: str, gathers: int, share: float
) -> None:
    made = Case(name, NUM, model="mlp", sizes=MLP).compiled()
    weights = made.plan.graph.parameters.values()
    assert kinds(fetches(made)) == {"all_gather": len(weights)}
    assert kinds(reductions(made)) == {"reduce_scatter": len(weights)}
    assert kinds([*forward(made), *backward(made)]) == {}
    # Weights are gathered once per step, or under ZeRO 3 in each window's forward and backward.
    text = made.files[0]
    windows = {use.unit for use in made.materialized.weights.uses if use.is_fetched}
    assert text.count("run.unshard(") == gathers * len(windows)
    volume = gathers * sent_bytes(fetches(made)) + sent_bytes(reductions(made))
    assert volume == share * all_reduce_bytes(weights)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_stores_every_element_on_one_device(name: str) -> None:
    made = Case(name, NUM, model="mlp", sizes=MLP).compiled()
    for tensor, side in made.materialized.weights.storage.items():
        volumes = [shard.box.num_elements for shard in side.shards.values()]
        assert volumes == [tensor.box.num_elements // NUM] * NUM


def test_zero1_in_stages_stores_shared_weights_in_pieces() -> None:
    options = {"tp": 2, "pp": 2, "zero": 1}
    made = Case("hybrid", 8, options, sizes={"layers": 2}).compiled()
    storage = made.materialized.weights.storage
    cut = storage[made.plan.graph.parameter("layers.1.mlp.up.weight")]
    shared = storage[made.plan.graph.parameter("layers.1.norm2.weight")]
    assert sorted(cut.shards) == sorted(shared.shards) == [4, 5, 6, 7]
    assert {shard.box.shape for shard in cut.shards.values()} == {(16, 16)}
    assert {shard.box.shape for shard in shared.shards.values()} == {(4,)}


# --- experts and stages -------------------------------------------------------------------------


def test_expert_parallel_has_two_all_to_alls_per_expert_layer_and_direction() -> None:
    made = Case("expert_parallel", NUM, model="moe", sizes={"layers": 6}).compiled()
    assert kinds(forward(made)) == {"all_to_all": 2 * 3}
    assert kinds(backward(made))["all_to_all"] == 2 * 3
    assert set(kinds(backward(made))) <= {"all_to_all", "all_reduce"}  # see data parallel
    experts = made.plan.graph.parameter("layers.1.moe.experts.up")
    assert {s.box.shape for s in made.materialized.weights.storage[experts].shards.values()} == {
        (1, 16, 64)
    }


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zero_bubble", *FOLDED, *ASYNCHRONOUS])
def test_pipelines_send_one_hidden_state_between_stages_each_way(name: str) -> None:
    made = Case(name, 2, sizes={"layers": 4}).compiled()
    num_stages = 4 if name in FOLDED else 2
    assert made.plan.num_stages == num_stages
    # In a V the two stages in the middle are on one device.
    num_sent = num_stages - 1 - name.endswith("_v")
    assert kinds(forward(made)) == kinds(backward(made)) == {"transfer": num_sent}
    hidden = 4 * 8 * 16 * 8  # batch, sequence, width, bytes of a float64
    assert sent_bytes(forward(made)) == num_sent * hidden
    assert kinds(reductions(made)) == {}


def test_token_slices_together_send_as_much_as_a_whole_microbatch() -> None:
    made = Case("terapipe", 2, {"lengths": (4, 3, 1)}, sizes={"layers": 2}).compiled()
    assert kinds(forward(made)) == kinds(backward(made)) == {"transfer": 3}
    hidden = 4 * 8 * 16 * 8  # batch, sequence, width, bytes of a float64
    assert sent_bytes(forward(made)) == sent_bytes(backward(made)) == hidden
    # Slices of a stage add their gradients on its device.
    assert kinds(reductions(made)) == {}


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_chimera_sends_as_much_as_1f1b_and_reduces_gradients_in_pairs_once(name: str) -> None:
    made = Case(name, NUM, sizes={"layers": 4}).compiled()
    straight = Case("one_f_one_b", NUM, {"microbatches": 4}, sizes={"layers": 4}).compiled()
    # Each direction carries half of the microbatches.
    assert sent_bytes(forward(made)) == 2 * sent_bytes(forward(straight))
    assert sent_bytes(backward(made)) == 2 * sent_bytes(backward(straight))
    pairs = {t.devices for t in reductions(made)}
    assert pairs == {(0, 3), (1, 2)}
    # In an all-reduce of two devices each of them sends the tensor once.
    parameters = made.plan.graph.parameters.values()
    assert sent_bytes(reductions(made)) == 2 * sum(tensor.num_bytes for tensor in parameters)


# --- images -------------------------------------------------------------------------------------


WINDOWS = ((3, 2, 1), (7, 1, 3))
"""Kernel, stride and padding of the convolutions of a tower; one before them reads inputs."""


class Tower(nn.Module):
    """Convolutions of images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 5, padding=2)
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, k, s, padding=p) for k, s, p in WINDOWS)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for conv in self.convs:
            x = conv(torch.tanh(x))
        return x.square().mean()


def halo(size: int, window: tuple[int, int, int], num: int) -> list[tuple[set[int], set[int]]]:
    """Rows of an image that each of ``num`` devices reads, and those that it has."""
    kernel, stride, padding = window
    count = (size + 2 * padding - kernel) // stride + 1
    found = []
    for i in range(num):
        windows = range(count * i // num, count * (i + 1) // num)
        met = {y * stride - padding + k for y in windows for k in range(kernel)}
        rows = range(size * i // num, size * (i + 1) // num)
        found.append((met & set(range(size)), set(rows)))
    return found


@pytest.mark.parametrize(
    ("num", "rows", "columns"), [(2, 2, 1), (6, 6, 1), (3, 1, 3), (4, 2, 2), (6, 3, 2), (8, 2, 2)]
)
def test_spatial_sends_exactly_the_halos_of_the_windows(num: int, rows: int, columns: int) -> None:
    height, width, channels, batch = 12, 10, 2, 4
    graph = ss.capture(Tower().double(), (torch.zeros(batch, 3, height, width).double(),))
    plan = ss.Plan(graph, range(num))
    PLANS["spatial"](plan, rows=rows, columns=columns)
    made = ss.compile(plan)
    pixels = 0
    for window in WINDOWS:
        for reads_y, has_y in halo(height, window, rows):
            for reads_x, has_x in halo(width, window, columns):
                pixels += len(reads_y) * len(reads_x) - len(reads_y & has_y) * len(reads_x & has_x)
        height, width = (-(-size // window[1]) for size in (height, width))
    volume = pixels * channels * batch * 8
    report = made.report()
    for way in ("forward", "backward"):
        assert sum(row.sent_bytes for row in report.of(way)) == volume > 0


@pytest.mark.parametrize(("num", "tp"), [(4, 1), (8, 2), (8, 4)])
@pytest.mark.parametrize("rows", [False, True])
def test_interlaced_gathers_embeddings_for_readers_and_scatters_their_gradients(
    num: int, tp: int, rows: bool
) -> None:
    options = {"tp": tp, "microbatches": 2, "rows": rows}
    sizes = {"layers": 4, "heads": 8, "target_sequence": 8}
    made = Case("interlaced", num, options, model="mbart", sizes=sizes).compiled()
    hidden = 4 * 8 * 16 * 8  # batch, sequence, width, bytes of a float64
    looked_up = [e for e in made.materialized.edges.all if e.tensor.name.startswith("embed.")]
    assert len(looked_up) == 2
    for edge in looked_up:
        there, back = sent_bytes(edge.forward), sent_bytes(edge.backward)
        if rows:
            assert there == (num - 1) * hidden + tp * hidden * (num - 1) // num
            assert back >= (num - tp) * hidden
        else:
            assert there == tp * hidden * (num - 1) // num
            assert back == hidden * (num - tp) // num


def test_interlaced_sends_hidden_states_onward_and_encoder_result_to_the_decoder() -> None:
    sizes = {"layers": 4, "heads": 8, "target_sequence": 6}
    made = Case("interlaced", 8, {"microbatches": 2}, model="mbart", sizes=sizes).compiled()
    edges = [e for e in made.materialized.edges.all if not e.tensor.name.startswith("embed.")]
    sent = Counter(e.tensor.name for e in edges if e.crosses)
    assert sent.pop("encoder_norm.layer_norm") == 4
    assert sorted(sent.values()) == [1] * 6
    source, target = (4 * length * 16 * 8 for length in (8, 6))
    for way in ("forward", "backward"):
        volume = sent_bytes(t for e in edges for t in getattr(e, way))
        assert volume == (3 + 4) * source + 3 * target


# --- bounds -------------------------------------------------------------------------------------


LIMIT = [
    Case("zero3_offload", NUM, sizes={"layers": 4}),
    Case("mesh_2d", NUM, sizes={"layers": 4}),
    Case("tofu", NUM, sizes={"layers": 4}),
    Case("expert_parallel", NUM, model="moe"),
    Case("interlaced", NUM, model="mbart"),
    Case("dap", NUM, model="evoformer", sizes=EVEN),
    Case("branch_parallel", NUM, model="evoformer", sizes=EVEN),
    Case("megatron", NUM, model="wide_resnet", sizes={"classes": 8}),
    Case("spatial", NUM, {"rows": 4}, model="wide_resnet", sizes={"classes": 8, "image": 32}),
    Case("hybrid", 8, {"tp": 2, "pp": 2, "zero": 1, "sequence": True, "vocabulary": True}),
]


@pytest.mark.parametrize("case", LIMIT, ids=str)
def test_no_transfer_takes_longer_than_its_lower_bound(case: Case) -> None:
    made = case.compiled()
    every = [*forward(made), *backward(made), *fetches(made), *reductions(made)]
    # A scalar cannot be cut, so a sum of scalars is not at a bound that counts bytes alone.
    plans = moves(t for t in every if t.box.num_elements > 1)
    # Some microseconds of latency are left in the smallest tensors: alpha is not quite zero.
    assert max(plan.gap for plan in plans) <= 1.001
