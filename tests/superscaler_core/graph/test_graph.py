"""Graphs: names, data flow, dropped ops, and look-ups."""

import pytest

from superscaler_core.errors import AnnotationError, PlanError
from superscaler_core.graph.builder import GraphBuilder
from superscaler_core.graph.graph import is_in
from superscaler_core.graph.side_by_side import side_by_side


def two_layers() -> GraphBuilder:
    """x -> linear -> linear -> sum, and an op whose result no op reads."""
    build = GraphBuilder("two")
    x = build.input("x", (4, 6), "float32")
    w = build.parameter("layers.0.weight", (8, 6), "float32")
    v = build.parameter("layers.1.weight", (2, 8), "float32", requires_grad=False)
    build.alias("tied", "layers.0.weight")
    (y,) = build.op("linear", "b k+, n k+ -> b n", (x, w), [((4, 8), "float32")], "y",
                    module="layers.0")  # fmt: skip
    build.op("relu", "b s -> b s", (y,), [((4, 8), "float32")], "unread", module="layers.0")
    (z,) = build.op("linear", "b k+, n k+ -> b n", (y, v), [((4, 2), "float32")], "z",
                    module="layers.1")  # fmt: skip
    build.op("sum", "b+ s+ -> ()", (z,), [((), "float32")], "loss")
    return build


@pytest.fixture
def graph():
    build = two_layers()
    return build.build(build._ops[-1].outputs[0])


def test_unread_ops_are_dropped_and_the_rest_are_renumbered(graph):
    assert [op.kind for op in graph.ops] == ["linear", "linear", "sum"]
    assert [op.index for op in graph.ops] == [0, 1, 2]


def test_readers_list_ops_with_the_index_of_their_input(graph):
    (first, second, _) = graph.ops
    assert graph.readers[first.outputs[0]] == ((second, 0),)
    assert graph.readers[graph.parameters["layers.0.weight"]] == ((first, 1),)


def test_requires_grad_follows_from_trainable_parameters(graph):
    assert [op.outputs[0].requires_grad for op in graph.ops] == [True, True, True]
    build = GraphBuilder("frozen")
    w = build.parameter("w", (3,), "float32", requires_grad=False)
    (y,) = build.op("exp", "b -> b", (w,), [((3,), "float32")], "")
    assert not y.requires_grad


def test_tensor_names_are_unique():
    build = GraphBuilder("names")
    x = build.input("x", (3,), "float32")
    first = build.op("exp", "b -> b", (x,), [((3,), "float32")], "", module="m")[0]
    second = build.op("exp", "b -> b", (x,), [((3,), "float32")], "", module="m")[0]
    assert [first.name, second.name] == ["m.exp", "m.exp_2"]


def test_parameter_is_found_by_its_name_and_by_an_alias(graph):
    assert graph.parameter("tied") is graph.parameter("layers.0.weight")
    with pytest.raises(PlanError, match=r"no parameter 'layer.0.weight'; it has layers.0.weight"):
        graph.parameter("layer.0.weight")


def test_updates_are_elementwise_over_each_parameter(graph):
    update = graph.updates["layers.0.weight"]
    assert str(update.annotation) == "d0 d1, d0 d1 -> d0 d1"
    assert update.sizes == {"d0": 8, "d1": 6}


@pytest.mark.parametrize(
    "module, pattern, expected",
    [
        ("layers.0.attn.q", "layers.*.attn", True),
        ("layers.0.attn", "layers.*.attn", True),
        ("layers.0.attention", "layers.*.attn", False),
        ("layers.0", "layers.0.attn", False),
        ("layers.10.mlp", "layers.1", False),
        ("layers.1.moe.experts", "*.experts", True),
        ("", "layers", False),
    ],
)
def test_pattern_matches_a_module_and_its_submodules(module, pattern, expected):
    assert is_in(module, [pattern]) is expected


def test_ops_in_returns_the_ops_of_matching_modules(graph):
    assert [op.name for op in graph.ops_in("layers.*")] == ["layers.0:linear", "layers.1:linear"]


def test_loss_has_to_be_a_scalar():
    build = GraphBuilder("wide")
    x = build.input("x", (3,), "float32")
    (y,) = build.op("exp", "b -> b", (x,), [((3,), "float32")], "")
    with pytest.raises(PlanError, match=r"wide: the loss has shape \[3\]; .* a scalar"):
        build.build(y)


def test_error_of_shapes_that_do_not_fit_names_the_op():
    build = GraphBuilder("bad")
    x = build.input("x", (3,), "float32")
    with pytest.raises(AnnotationError, match="op m:exp: b -> b does not fit shapes"):
        build.op("exp", "b -> b", (x,), [((4,), "float32")], "", module="m")


# --- copies side by side


def test_side_by_side_copies_share_only_weights_and_inputs(graph):
    both = side_by_side(graph, 2)
    assert (both.inputs, both.parameters) == (graph.inputs, graph.parameters)
    assert both.ops[:3] == graph.ops
    assert both.losses == (graph.loss, both.ops[5].outputs[0])
    assert [op.index for op in both.ops] == [0, 1, 2, 3, 4, 5]
    assert not {t for op in graph.ops for t in op.outputs} & {
        t for op in both.ops[3:] for t in (*op.inputs, *op.outputs)
    }
    assert both.readers[graph.parameters["layers.0.weight"]] == ((both.ops[0], 1), (both.ops[3], 1))
    assert len({op.name for op in both.ops}) == len(both.producer) == 6


def test_copied_ops_have_the_form_and_the_seed_of_the_original(graph):
    both = side_by_side(graph, 3)
    for number, op in enumerate(both.ops):
        first = graph.ops[number % 3]
        assert (op.form, op.seed, op.copy_of or op) == (first.form, first.index, first)


def test_recycled_results_of_a_copy_are_inputs_of_the_same_copy():
    build = GraphBuilder("recycled")
    given = build.input("given", (3,), "float32")
    w = build.parameter("w", (3,), "float32")
    (made,) = build.op("mul", "b, b -> b", (given, w), [((3,), "float32")], "")
    (loss,) = build.op("sum", "b+ -> ()", (made,), [((), "float32")], "")
    both = side_by_side(build.build(loss, {given: made}), 2)
    ops = both.ops
    assert both.recycled == {
        ops[0].inputs[0]: ops[0].outputs[0],
        ops[2].inputs[0]: ops[2].outputs[0],
    }
    assert (both.inputs, both.batch_inputs) == ((ops[0].inputs[0], ops[2].inputs[0]), ())
