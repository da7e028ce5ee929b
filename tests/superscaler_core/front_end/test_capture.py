"""Capture: names, tied weights, constants, modes, and errors with advice."""

import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.front_end.export import trace
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.models import build, example_inputs
from superscaler_core.parallel import Programs, SProgram
from superscaler_core.rules import Ref
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.as_torch import HOW, compiled

X = torch.randn(4, 6, dtype=torch.float64)


class Net(nn.Module):
    """A module with one linear layer, whose loss is ``body(net, x)``."""

    def __init__(self, body, **buffers):
        super().__init__()
        self.line = nn.Linear(6, 6).double()
        self.body = body
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.body(self, x)


class Inner(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).sum()


def traced(model, *args):
    return trace(model, ModelCall.of(model, args, {}))


def same_as_eager(model, inputs):
    graph = ss.capture(model, inputs)
    parameters = dict(model.named_parameters())
    found, expected = evaluate(graph, inputs, parameters), model(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(y, list(parameters.values()), allow_unused=True)
        for y in (found, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    return graph


class Form(NamedTuple):
    loss: Tensor | None
    scores: Tensor


@pytest.mark.parametrize(
    "output",
    [
        lambda loss, x: (loss, x),
        lambda loss, x: [loss, x],
        lambda loss, x: {"scores": x, "loss": loss},
        lambda loss, x: Form(scores=x, loss=loss),
        lambda loss, x: SimpleNamespace(scores=x, loss=loss),
    ],
)
def test_loss_is_found_in_tuple_list_dict_and_object_outputs(output):
    model = Net(lambda net, x: output(net.line(x).sum(), x))
    alone = Net(lambda net, x: net.line(x).sum())
    assert str(ss.capture(model, (X,))) == str(ss.capture(alone, (X,)))


def test_inputs_may_be_given_as_keyword_arguments():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(6, 6).double()

        def forward(self, x, *, scale, flip=False, use_cache=True, **others):
            assert not use_cache
            return {"loss": ((-x if flip else x) * scale + self.line(x) * others["shift"]).sum()}

    given = {"shift": X + 1, "flip": True, "scale": X, "x": X}
    graph = ss.capture(ByName(), kwargs=given)
    assert [t.name for t in graph.inputs] == ["x", "scale", "shift"]
    assert str(ss.capture(ByName(), given)) == str(graph)
    with pytest.raises(ss.CaptureError, match=r"ByName.forward does not take x: .* 'scale'"):
        ss.capture(ByName(), {"x": X})


# --- the adapter ------------------------------------------------------------------------------


def test_trace_gives_plain_records():
    program = traced(Inner(nn.Linear(6, 3)), torch.ones(2, 6))
    linear, total = program.nodes
    assert [name for name, _ in program.inputs] == ["x"]
    assert list(program.parameters.values()) == ["layer.weight", "layer.bias"]
    assert linear.target == "aten.linear.default"
    assert linear.args["input"] == Ref("x")
    assert (linear.module, linear.module_type) == ("layer", "Linear")
    assert (linear.outputs[0].shape, linear.outputs[0].dtype) == ((2, 3), "float32")
    assert (linear.is_pointwise, linear.is_random, linear.writes) == (False, False, {})
    assert total.args == {"self": Ref(linear.name), "dtype": None}
    assert program.outputs == (Ref(total.name),)


def test_trace_fills_defaults_in_the_order_of_the_schema():
    (node, *_) = traced(Inner(nn.Dropout(0.3)), torch.ones(2)).nodes
    assert node.is_random
    assert list(node.args.items()) == [("input", Ref("x")), ("p", 0.3), ("train", True)]
    assert dict(node.given) == {"input": False, "p": False, "train": False}


# --- parameters, inputs and modules -----------------------------------------------------------


def test_tied_weight_is_one_parameter_with_an_alias():
    graph = ss.capture(build("gpt", tied=True), example_inputs("gpt", 2))
    assert graph.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in graph.parameters
    readers = graph.readers[graph.parameters["embed.weight"]]
    assert [op.name for op, _ in readers] == ["embed:embedding", "head:linear"]


def test_unused_and_frozen_parameters_are_kept():
    model = Net(lambda net, x: net.line(x).sum())
    model.unused = nn.Parameter(torch.ones(3))
    model.line.bias.requires_grad_(False)
    graph = ss.capture(model, (X,))
    assert list(graph.parameters) == ["unused", "line.weight", "line.bias"]
    assert not graph.parameters["line.bias"].requires_grad


def test_module_called_twice_shares_its_parameters():
    graph = same_as_eager(Net(lambda net, x: net.line(net.line(x)).sum()), (X,))
    assert [op.module for op in graph.ops if op.kind == "linear"] == ["line", "line"]


def test_one_tensor_given_twice_is_two_inputs():
    class Two(nn.Module):
        def forward(self, x, y):
            return (x * 2 + y).sum()

    assert [t.name for t in ss.capture(Two(), (X, X)).inputs] == ["x", "y"]


def test_meta_device_model_gives_the_same_graph():
    inputs = example_inputs("gpt", 2)
    with torch.device("meta"):
        model = build("gpt")
    on_meta, real = ss.capture(model, inputs), ss.capture(build("gpt"), inputs)
    assert str(on_meta) == str(real)
    assert {n: v.tolist() for n, v in on_meta.constants.items()} == {
        n: v.tolist() for n, v in real.constants.items()
    }


# --- constants, modes and in-place ops --------------------------------------------------------


def test_values_independent_of_inputs_are_folded_into_constants():
    def body(net, x):
        mask = torch.ones(6, 6, dtype=x.dtype)
        mask[0, 1] = 3
        mask = mask.tril() * torch.tensor([1.0, 2, 3, 4, 5, 6])
        return (net.line(x) @ mask + net.ramp + torch.zeros_like(x) + x.new_full((6,), 2)).sum()

    graph = same_as_eager(Net(body, ramp=torch.arange(6.0)), (X,))
    assert [op.kind for op in graph.ops] == [
        "linear", "add_bias", "matmul", "add", "add", "add", "sum",
    ]  # fmt: skip
    assert graph.constants["ramp"].tolist() == [0, 1, 2, 3, 4, 5]
    (mask,) = (value for value in graph.constants.values() if value.shape == (6, 6))
    assert mask[:, 0].tolist() == [1] * 6
    assert mask[0].tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "read, value",
    [
        (lambda x, buffer: x[:, buffer], torch.arange(6)),
        (lambda x, buffer: F.embedding_bag(torch.arange(4), x, buffer), torch.arange(0, 4, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")
def test_buffer_of_whose_value_the_graph_makes_use_is_folded(read, value):
    def body(net, x):
        return (net.line(read(x, net.ramp)) ** 2).sum()

    assert same_as_eager(Net(body, ramp=value), (X,)).folded == {"ramp"}
    assert same_as_eager(Net(body, ramp=value.flip(0) * 0), (X,)).folded == frozenset()


def test_index_in_a_buffer_that_the_model_changes_is_read_in_every_step():
    def body(net, x):
        loss = (net.line(x[:, net.ramp]) ** 2).sum()
        net.ramp.copy_((net.ramp + 1) % 6)
        return loss

    graph = ss.capture(Net(body, ramp=torch.arange(6)).double(), (X,))
    assert graph.ops[0].code == "{x0}[:, {x1}]"
    assert graph.folded == frozenset()


# --- errors -----------------------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "model, message",
    [
        (Branch(), r"cannot follow the model itself: .* @register_op"),
        (Net(lambda net, x: net.line(x[x[:, 0].nonzero()[:, 0]]).sum()), "depends on values"),
        (Net(lambda net, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (net.line(x),)).sum()),
         r"the model itself calls torch.cond, .* choose by torch.where.* @register_op"),
        (Net(lambda net, x: (net.line(x) * 1).transpose_(0, 1).sum()),
         r"transpose_.* has no form that returns a new tensor; compute .* by other ops"),
        (Net(lambda net, x: {"scores": net.line(x).sum()}), "dict without a loss; .* given labels"),
        (Net(lambda net, x: torch.ones(())), "returns a value that no op computes"),
        (Net(lambda net, x: net.line(x[torch.randperm(4, generator=torch.Generator())]).sum()),
         "randperm.* a torch.Generator of its own"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_model_that_cannot_be_captured_raises_capture_error(model, message):
    with pytest.raises(ss.CaptureError, match=message):
        ss.capture(model.double(), (X,))


@pytest.mark.parametrize(
    "body, is_frozen",
    [
        (lambda net, x: net.line(x).sum().detach(), False),
        (lambda net, x: net.line(x).long().sum(), False),
        (lambda net, x: net.line(x).sum(), True),
    ],
    ids=["detached", "integer", "frozen"],
)
def test_training_on_a_loss_without_gradient_raises_as_backward_does(body, is_frozen):
    model = Net(body).requires_grad_(not is_frozen).double()
    programs = Programs(model, SProgram.of("data_parallel", None), 2)
    with pytest.raises(
        ss.PlanError, match="Net cannot be trained: element 0 of tensors does not req"
    ):
        programs.first(programs.call((X,), None))
    plan = ss.Plan(ss.capture(model, (X,)), range(2))
    HOW["data_parallel"](plan)
    assert ss.compile(plan.without_grad()).summary()


def test_sparse_input_raises_capture_error():
    with pytest.raises(ss.CaptureError, match=r"input 'x' is sparse_coo.*pass what is dense"):
        ss.capture(Net(lambda net, x: net.line(x.to_dense()).sum()), kwargs={"x": X.to_sparse()})


def test_non_scalar_loss_raises_plan_error():
    with pytest.raises(ss.PlanError, match=r"Net: the loss has shape \[4, 6\]"):
        ss.capture(Net(lambda net, x: net.line(x)), (X,))


def test_graph_with_meta_buffers_compiles_but_cannot_be_saved(tmp_path):
    def body(net, x):
        return (net.line(x) * net.ramp + (net.ramp.cos().outer(net.ramp) @ net.ones).T).sum()

    model = Net(body, ramp=torch.ones(6), unread=torch.ones(2), ones=torch.ones(6, 1)).double()
    graph = ss.capture(Net(body, **dict(model.to("meta").named_buffers())).to("meta"), (X,))
    assert graph.valueless == {"ramp", "ones"}
    program = compiled(graph, "data_parallel")
    assert program.summary()
    with pytest.raises(ss.PlanError, match=r"without values of its buffers ones, ramp, .* the CPU"):
        program.save(tmp_path)


class Selects(nn.Module):
    def forward(self, y):
        return y[y[:, 0] > 0]


class Wrong(nn.Linear):
    def forward(self, y):
        return super().forward(y, y)


def branches(net, x):
    return x.sum() if net.line(x).sum() > 0 else x.sum() * 2


def counts(net, x):
    return net.line(x).sum() * x.argmax().item()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Inner(Selects()), "return y[y[:, 0] > 0]"),
        (Inner(Wrong(6, 6)), "return super().forward(y, y)"),
        (Net(branches), "return x.sum() if net.line(x).sum() > 0 else x.sum() * 2"),
        (Net(counts), "return self.body(self, x)"),
    ],
)
def test_capture_error_is_short_and_quotes_the_line_of_the_user(model, line, capfd):
    with pytest.raises(ss.CaptureError, match=re.escape(line)) as caught:
        ss.capture(model, (X,))
    assert "(test_capture.py:" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    out, err = capfd.readouterr()
    assert not out + err
