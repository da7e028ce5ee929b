"""Published examples of specs: GShard's experts, Megatron's cuts, GSPMD's 2-D layout."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import superscaler_core as ss
from superscaler_core.models import build, example_inputs
from superscaler_core.parallel import SProgram
from superscaler_core.published.gspmd import Propagated
from superscaler_core.published.gspmd.price import cut_text
from tests.superscaler_core.cases import Case
from tests.superscaler_core.plans.test_plans_communication import (
    backward,
    fetches,
    forward,
    kinds,
    reductions,
)
from tests.superscaler_core.published.gspmd.programs import Experts, completed


def cuts_of(found: Propagated) -> dict[str, str]:
    return {op.name: cut_text(cut) for op, cut in found.cuts.items()}


def compiled(graph: ss.Graph, text: str, num_devices: int) -> ss.Compiled:
    plan = ss.Plan(graph, range(num_devices))
    SProgram.of(text)(plan, 1)
    return ss.compile(plan)


# --- GShard -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts() -> ss.Graph:
    with torch.device("meta"):
        return ss.capture(Experts(), (torch.ones(4, 6, 6),))


def test_gates_are_cut_by_group_and_expert_layers_by_expert(experts: ss.Graph) -> None:
    """GShard's program cuts groups of tokens, and then experts, along the same axis."""
    found = completed(experts, "x:4")
    cuts = cuts_of(found)
    gates, dispatch, up, down, combine = (n for n in cuts if n.startswith("einsum"))
    assert [cuts[n] for n in (gates, dispatch, up, down)] == ["g@x", "g@x", "e@x", "e@x"]
    assert (cuts[combine], cuts["top_gating"]) == ("g@x", "g@x")
    words = {name: str(found.spec(name)) for name in ("wg", "wi", "wo", "inputs")}
    assert words == {"wg": "*@-", "wi": "d0@x, *@-", "wo": "d0@x, *@-", "inputs": "d0@x, *@-"}
    assert [choice.op for choice in found.choices] == [dispatch, combine]


def test_expert_layer_has_two_all_to_alls_forward_and_two_backward(experts: ss.Graph) -> None:
    made = compiled(experts, "gspmd", 4)
    assert kinds(forward(made)) == kinds(backward(made)) == {"all_to_all": 2}
    assert kinds(fetches(made)) == {}
    # Only the weights of the gates and of the map before are replicated, so only these are reduced.
    assert kinds(reductions(made)) == {"all_reduce": 2}


# --- Megatron -----------------------------------------------------------------------------------


def gpt(**sizes: int) -> ss.Graph:
    with torch.device("meta"):
        model, inputs = build("gpt", **sizes), example_inputs("gpt", 4, **sizes)
    return ss.capture(model, inputs)


MEGATRON = "tokens:d0@x;*.attn.q.weight:d0@y;*.mlp.up.weight:d0@y"


def test_three_specs_give_megatrons_cuts() -> None:
    """Attention is cut by heads and the MLP by features. Each ends in an all-reduce."""
    made = compiled(gpt(layers=2), f"gspmd:mesh=x:1,y:4,specs={MEGATRON}", 4)
    wanted = ss.Plan(made.plan.graph, range(4))
    SProgram.of("megatron")(wanted, 1)
    assert kinds(forward(made)) == kinds(backward(made)) == {"all_reduce": 4}
    words = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down")
    for op in made.plan.graph.ops:
        if op.module.endswith(words) and op.kind == "linear":
            pieces = [[p.pieces for p in plan.op_split(op).parts] for plan in (made.plan, wanted)]
            assert pieces[0] == pieces[1], op


# --- GSPMD --------------------------------------------------------------------------------------

TWO_DIMS = (
    "embed:embedding:d0@x,d2@y;"  # activations [B, S, M]
    "*.attn.?.weight:d0@y,d1@x;*.attn.out.weight:d0@x,d1@y;"  # [N D, M] and [M, N D]
    "*.mlp.up.weight:d0@y,d1@x;*.mlp.down.weight:d0@x,d1@y"  # [H, M] and [M, H]
)
"""The layout that GSPMD calls "2-D finalized".

Every weight is cut along both axes, and activations are cut by batch and width.
"""


def test_two_dim_layout_of_a_dense_transformer_has_the_published_cuts() -> None:
    """Inside a layer, y cuts heads and hidden features, and x cuts the batch.

    For the products, weights are gathered along x, as in ZeRO, and the width along y.
    """
    found = completed(
        gpt(layers=1, width=1024, heads=8, sequence=256, vocabulary=512),
        "x:2,y:4",
        dict(word.rsplit(":", 1) for word in TWO_DIMS.split(";")),
    )
    cuts = cuts_of(found)
    inner = [n for n in cuts if n.startswith("layers") and n.endswith(":linear")]
    assert {n: cuts[n] for n in inner if "out" not in n and "down" not in n} == dict.fromkeys(
        (f"layers.0.{word}:linear" for word in ("attn.q", "attn.k", "attn.v", "mlp.up")), "b@x, n@y"
    )
    assert cuts["layers.0.attn:attention"] == "b@x, h@y"
    assert cuts["layers.0.mlp.down:linear"] == cuts["layers.0.attn.out:linear"] == "b@x, k@y"
    specs = Counter(str(found.spec(n)) for n in ("layers.0.add", "layers.0.add_2", "add"))
    assert specs == {"d0@x, d2@y, *@-": 3}


def test_two_dim_layout_gathers_weights_and_reduce_scatters_sums() -> None:
    sizes = {"width": 1024, "heads": 8, "sequence": 256, "vocabulary": 512}
    one, two = (
        compiled(gpt(layers=n, **sizes), f"gspmd:mesh=x:2,y:4,specs={TWO_DIMS}", 8) for n in (1, 2)
    )
    assert kinds(forward(two)) - kinds(forward(one)) == {"all_gather": 2, "reduce_scatter": 2}
    assert (kinds(fetches(two)) - kinds(fetches(one)))["all_gather"] == 6
    stored = two.materialized.weights.storage
    shares = {
        shard.box.num_elements / tensor.box.num_elements
        for tensor, side in stored.items()
        if len(tensor.shape) == 2 and tensor.name.startswith("layers")
        for shard in side.shards.values()
    }
    assert shares == {1 / 8}


def test_one_spec_of_images_cuts_all_convolutions_spatially() -> None:
    """All convolutions are cut by rows of the image, and they exchange halos."""
    images = Case("spatial", 2, model="wide_resnet")
    graph = images.planned().graph
    cuts = {op.name: cut for op, cut in completed(graph, "x:2", {"images": "d2@x"}).cuts.items()}
    convolutions = [op.name for op in graph.ops if op.kind == "conv2d"]
    assert {cuts[name] for name in convolutions} == {(("y0", ("x",)),)}
    assert kinds(forward(compiled(graph, "gspmd:specs=images:d2@x", 2))).keys() == {"exchange"}


@pytest.mark.parametrize(
    ("specs", "wanted"),
    [
        ({"u": "d0@x", "w": "d0@y"}, "b@x, n@y"),
        ({"u": "d0@x, d1@y", "w": "d1@y"}, "b@x, k@y"),
        ({"u": "d1@x"}, "k@x"),
        ({"u": "d0@x", "linear": "d1@y"}, "b@x, n@y"),
    ],
)
def test_product_is_cut_by_the_published_rules(specs: dict[str, str], wanted: str) -> None:
    """The three cases of a dot: a loop of one operand, a contracted loop, and both on two axes."""
    builder = ss.GraphBuilder("product")
    u = builder.input("u", (8, 6), "float32")
    w = builder.parameter("w", (4, 6), "float32")
    (y,) = builder.op(
        "linear", "b k+, n k+ -> b n", [u, w], [((8, 4), "float32")], "F.linear({x0}, {x1})"
    )
    (loss,) = builder.op("sum", "b+ n+ -> ()", [y], [((), "float32")], "{x0}.sum()")
    found = completed(builder.build(loss), "x:2,y:2", specs)
    assert cuts_of(found)["linear"] == wanted
