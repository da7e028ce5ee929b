"""Models: captured graphs compute the same values as the models, whole and split."""

import pytest
import torch
from torch import nn

import superscaler_core as ss
from superscaler_core.models import MODELS, build, config_of, example_inputs
from superscaler_core.models.moe import top_gating
from superscaler_core.models.recycling import last_pass
from superscaler_core.run import run_part
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.parts import check_splits, values_of

TINY = [
    ("evoformer", "tiny", {"outer_last": True, "dropout": 0.2, "layers": 1}),
    ("gpt", "tiny", {"tied": True, "dropout": 0.2}),
    ("gpt", "tiny", {"fused": False}),
    ("moe", "tiny", {}),
    ("moe", "tiny-switch", {}),
    ("moe_encoder", "tiny-bert-switch", {"dropout": 0.2}),
    ("moe_encoder", "tiny-vit-sgmoe", {}),
    ("mbart", "tiny-translation", {"dropout": 0.2}),
    ("mlp", "tiny-classes", {}),
    ("swin", "tiny", {}),
    ("wide_resnet", "tiny", {}),
]
IDS = [" ".join([name, preset, *sizes]) for name, preset, sizes in TINY]


def made(name, preset, sizes, batch=3):
    torch.manual_seed(0)
    model = build(name, preset, **sizes).double()
    inputs = example_inputs(name, batch, preset, **sizes)
    return model, [x.double() if x.is_floating_point() else x for x in inputs]


def graph_of(name, model, inputs):
    return ss.capture(model, inputs, recycled=MODELS[name].recycled)


@pytest.mark.parametrize("name, preset, sizes", TINY, ids=IDS)
def test_graph_computes_the_loss_and_gradients_of_the_model(name, preset, sizes):
    model, inputs = made(name, preset, sizes)
    model.eval()
    graph = graph_of(name, model, inputs)
    parameters = dict(model.named_parameters())
    given = inputs[: len(graph.batch_inputs)]
    found = evaluate(graph, given, parameters, passes=len(graph.recycled))
    expected = last_pass(model, inputs, MODELS[name].recycled, len(graph.recycled))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(y, list(parameters.values())) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name, preset, sizes", TINY[2::2], ids=IDS[2::2])
def test_split_ops_of_every_kind_equal_the_whole(name, preset, sizes):
    model, inputs = made(name, preset, sizes)
    graph = graph_of(name, model, inputs)
    values = values_of(graph, inputs, dict(model.named_parameters()))
    kinds = {(op.code, str(op.annotation), *op.sizes.items()): op for op in graph.ops}
    for op in kinds.values():
        check_splits(op, [values[t] for t in op.inputs])


@pytest.mark.parametrize("name", MODELS)
def test_batch_loop_of_every_op_that_reads_the_batch_can_be_split(name):
    """Data parallelism can therefore split every op that depends on the batch."""
    model, inputs = made(name, "tiny", {}, batch=6)
    graph = graph_of(name, model, inputs)
    depends = set(graph.inputs)
    for op in graph.ops:
        if not depends.intersection(op.inputs):
            continue
        depends.update(op.outputs)
        batch = [i for i, size in op.sizes.items() if size == 6 and op.is_splittable(i)]
        reads_batch = any(6 in t.shape for t in op.inputs if t in depends)
        assert batch or not reads_batch, str(op)


# --- memory that autograd keeps ---------------------------------------------------------------


def kept_bytes(function, inputs) -> int:
    """Bytes that autograd keeps for a call; shared memory is counted once."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = function(inputs)
    assert results
    for x in inputs:
        if isinstance(x, nn.Parameter):
            kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize(
    "name, preset", [("evoformer", "tiny"), ("gpt", "tiny"), ("wide_resnet", "tiny")]
)
def test_saved_operands_of_ops_match_the_bytes_that_autograd_keeps(name, preset):
    """Tensors much smaller than the operands, such as statistics of a norm, are tolerated."""
    model, inputs = made(name, preset, {}, batch=4)
    graph = graph_of(name, model, inputs)
    values = values_of(graph, inputs, dict(model.named_parameters()))
    for op in {op.kind: op for op in graph.ops}.values():
        leaves = [
            nn.Parameter(values[t]) if t.kind == "parameter"
            else values[t].clone().requires_grad_(t.requires_grad)
            for t in op.inputs
        ]  # fmt: skip
        kept = kept_bytes(lambda leaves, op=op: run_part(ss.Part(op), leaves), leaves)
        operands = [*op.inputs, *op.outputs]
        said = sum(operands[i].num_bytes for i in op.saves)
        largest = max(t.num_bytes for t in operands)
        assert abs(kept - said) <= largest / 4, (str(op), kept, said)


# --- the mixture of experts -------------------------------------------------------------------


@pytest.mark.parametrize("top", [1, 2])
def test_gating_gives_each_slot_to_one_token_and_each_token_its_weight(top):
    scores = torch.randn(3, 16, 4, dtype=torch.float64)
    capacity = 16
    combine, balance = top_gating(scores, top=top, capacity=capacity)
    assert combine.shape == (3, 16, 4, capacity)
    assert ((combine > 0).sum(1) <= 1).all()
    assert ((combine > 0).sum((2, 3)) == top).all()
    best = scores.softmax(-1).topk(top, -1).values
    expected = best.sum(-1) if top == 1 else torch.ones(3, 16, dtype=torch.float64)
    torch.testing.assert_close(combine.sum((2, 3)), expected)
    assert balance.shape == (3,)


def test_gating_drops_tokens_beyond_the_capacity():
    scores = torch.zeros(1, 5, 2, dtype=torch.float64)
    scores[..., 0] = 1.0
    combine, balance = top_gating(scores, top=1, capacity=3)
    assert (combine > 0).sum((2, 3)).tolist() == [[1, 1, 1, 0, 0]]
    assert [int(combine[0, s, 0].argmax()) for s in range(3)] == [0, 1, 2]
    # All tokens choose expert 0: the mean over two experts of share * mean gate is gate / 2.
    torch.testing.assert_close(balance, scores.softmax(-1)[:, 0, 0] / 2)


def test_second_choices_are_placed_after_all_first_choices():
    # Token 0 prefers 0 then 1; tokens 1 and 2 prefer 1 then 0.
    scores = torch.tensor([[[2.0, 1.0], [1.0, 2.0], [1.0, 2.0]]], dtype=torch.float64)
    combine, _ = top_gating(scores, top=2, capacity=4)
    places = (combine[0] > 0).to(torch.int64).argmax(-1)
    assert places.tolist() == [[0, 2], [1, 0], [2, 1]]


@pytest.mark.parametrize("preset, capacity", [("bert-switch", 10), ("bert-top2", 20)])
def test_expert_capacity_equals_that_of_the_published_models(preset, capacity):
    """HiDup: sequence 128, 16 experts, factors 1.25 and 2.5."""
    assert config_of("moe", preset).capacity == capacity


# --- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, preset, sizes, message",
    [
        ("bert", "tiny", {}, f"no model 'bert'; there are {', '.join(MODELS)}"),
        ("gpt", "huge", {}, "no preset 'huge'; it has tiny, 1.3B, 6.7B, 15B"),
        ("gpt", "tiny", {"depth": 3}, "depth.*its sizes are vocabulary, sequence, layers"),
    ],
)
def test_unknown_names_raise_value_error_listing_known_names(name, preset, sizes, message):
    with pytest.raises(ValueError, match=message):
        build(name, preset, **sizes)


@pytest.mark.parametrize(
    "name, preset, billions", [("gpt", "15B", 15.6), ("wide_resnet", "50-2", 0.069)]
)
def test_presets_have_their_published_number_of_parameters(name, preset, billions):
    with torch.device("meta"):
        model = build(name, preset)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)
