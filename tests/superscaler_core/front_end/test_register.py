"""Registered functions: one op under capture, the function itself everywhere else."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.cost import profile_of
from superscaler_core.rules import REGISTERED
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core import registered
from tests.superscaler_core.as_torch import compiled, on_ranks
from tests.superscaler_core.parts import check_splits, values_of

PATH = "tests.superscaler_core.registered"


class Uses(nn.Module):
    """Calls ``function(x, weight)``; the loss is the sum of the squared results."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        made = self.function(x, self.weight)
        return sum((t.double() ** 2).sum() for t in (made if isinstance(made, tuple) else (made,)))


def captured(model, *shape):
    x = torch.randn(shape, dtype=torch.float64)
    return ss.capture(model, (x,)), x


def test_registered_function_is_one_op_called_by_its_path():
    graph, _ = captured(Uses(lambda x, w: registered.grouped(x, w, groups=2), 3, 4), 5, 6)
    op = graph.ops[0]
    assert (op.kind, str(op.annotation)) == ("grouped", "b (g e^), e^ f -> b (g f)")
    assert op.sizes == {"b": 5, "g": 2, "e": 3, "f": 4}
    assert op.code == f"{PATH}.grouped({{x0}}, {{x1}}, groups=2, scale=0.5)"
    assert op.flops == 2.0


def test_flops_that_are_not_given_are_those_of_the_products(monkeypatch):
    name = next(n for n, known in REGISTERED.items() if known.path == f"{PATH}.grouped")
    monkeypatch.setitem(REGISTERED, name, replace(REGISTERED[name], flops=None))
    graph, _ = captured(Uses(lambda x, w: registered.grouped(x, w, groups=2), 3, 4), 5, 6)
    assert graph.ops[0].flops == 2.0


def test_flops_of_a_function_that_reads_values_are_one_for_each_element():
    graph, _ = captured(Uses(lambda x, w: registered.best(x * w, count=2), 6), 5, 6)
    (op,) = (op for op in graph.ops if op.kind == "best")
    assert op.flops * prod(op.sizes.values()) == 5 * 6


def test_registered_op_computes_and_splits_correctly():
    model = Uses(lambda x, w: registered.grouped(x, w, groups=2, scale=0.25), 3, 4)
    graph, x = captured(model, 5, 6)
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(evaluate(graph, (x,), parameters), model(x))
    values = values_of(graph, (x,), parameters)
    check_splits(graph.ops[0], [values[t] for t in graph.ops[0].inputs])


def test_registered_function_may_return_several_results():
    model = Uses(registered.halves, 6)
    graph, x = captured(model, 5, 6)
    op = graph.ops[0]
    assert [t.shape for t in op.outputs] == [(5,), (6,)]
    torch.testing.assert_close(evaluate(graph, (x,), dict(model.named_parameters())), model(x))


def test_registered_function_of_constants_is_computed_at_capture():
    graph, _ = captured(Uses(lambda x, w: registered.best(torch.eye(6), count=2) * w[:2], 6), 6, 6)
    assert [op.kind for op in graph.ops][:2] == ["slice", "mul"]
    (value,) = graph.constants.values()
    assert value.tolist() == [[1, 0]] * 6


def test_op_lists_the_modules_to_import():
    graph, _ = captured(Uses(lambda x, w: registered.grouped(x, w, groups=2), 3, 4), 5, 6)
    assert [op.imports for op in graph.ops[:2]] == [(PATH,), ()]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: registered.positive(x * w),
        lambda x, w: x.gather(1, registered.best(x * w, count=2)) * w[:2],
    ],
)
def test_value_dependent_function_can_be_planned_simulated_and_run(function, tmp_path):
    model = Uses(function, 6)
    graph, x = captured(model, 6, 6)
    program = compiled(graph, "data_parallel")
    assert 6 * 8 < program.memory[0].total_bytes < 1 << 20
    assert "memory" in program.summary()
    assert ss.simulate(program, profile=profile_of("a100")).secs > 0
    expected = model(x)
    expected.backward()

    def step(trainer: ss.Trainer):
        loss = trainer.step(x)
        return loss, [p.grad for p in trainer.parameters()]

    for loss, grads in on_ranks(program, tmp_path, step):
        torch.testing.assert_close(loss, expected.detach())
        for grad in grads:
            torch.testing.assert_close(grad, model.weight.grad)


def _two(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def _untyped(x: Tensor, *, size) -> Tensor:
    return x


@pytest.mark.parametrize(
    "annotation, options, function, message",
    [
        ("b s^ -> b k^", {}, _two, r'no input says how large k is; give sizes=\{"k": \.\.\.\}'),
        ("b s^ -> b s^ k", {"sizes": {"k": 2}}, _two, r"only outputs have k, .* write 'k\^'"),
        ("b -> b", {"dtypes": ["int64", None]}, _two, "has 1 outputs, but 2 dtypes"),
        ("b -> b", {}, _two, "has to take 1 tensors, .* by keyword only"),
        ("b, b, b -> b", {}, _two, "has to take 3 tensors"),
        ("b -> b", {}, _untyped,
         "argument 'size' needs an annotation out of int, float, bool, str"),
        ("b k -> b", {}, _two, "some output lacks k"),
        ("b y-1+1 -> b y", {}, _two, "a registered function is not told where its windows reach"),
    ],
)  # fmt: skip
def test_annotation_that_does_not_fit_the_function_is_an_error(
    annotation, options, function, message
):
    with pytest.raises(ss.AnnotationError, match=message):
        ss.register_op(annotation, **options)(function)


def test_function_that_cannot_be_imported_is_an_error_when_captured():
    @ss.register_op("b s, s -> b s")
    def local(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    with pytest.raises(ss.CaptureError, match=r"cannot import .*local; define it at the top"):
        captured(Uses(local, 6), 5, 6)


def test_tensors_that_do_not_fit_the_annotation_are_an_error():
    with pytest.raises(ss.CaptureError, match=r"does not fit shapes|do not say"):
        captured(Uses(lambda x, w: registered.grouped(x, w, groups=4), 3, 4), 5, 6)
