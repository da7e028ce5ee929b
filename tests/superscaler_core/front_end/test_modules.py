"""Modules that are one op: those that tracing cannot follow, and those that are registered."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import superscaler_core as ss
from superscaler_core.cost import profile_of
from superscaler_core.cost.op_memory import op_memory
from superscaler_core.front_end import modules as front_end
from superscaler_core.ops import modules as run_time
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.as_torch import check_program, compiled, on_ranks
from tests.superscaler_core.modules import WIDTH, Experts, Model, Named, Other, model_of
from tests.superscaler_core.parts import check_splits, values_of

X = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
PLANS_OF = ["data_parallel", "zero3", "one_f_one_b", "hybrid"]


@pytest.fixture
def other():
    """Experts of the class ``Other`` can be split by rows."""
    ss.register_module(Other, "b h^ -> b h^")
    yield
    front_end.REGISTERED_MODULES.clear()


def captured(model: nn.Module) -> ss.Graph:
    with pytest.warns(ss.OpaqueWarning):
        return ss.capture(model, (X,))


def experts_of(graph: ss.Graph) -> list[ss.Op]:
    return [op for op in graph.ops if "experts" in op.module]


def test_innermost_untraceable_module_becomes_one_op():
    model = model_of()
    with pytest.warns(ss.OpaqueWarning, match=r"Experts in layers.\*.experts, 2 times") as caught:
        graph = ss.capture(model, (X,))
    assert 'register_module(Experts, "b d1_6^ -> b d1_6^")' in str(caught[0].message)
    assert graph.opaque == (*experts_of(graph),)
    one, two = graph.opaque
    assert (one.kind, one.form) == ("Experts", two.form)
    assert [t.name for t in one.inputs[1:]] == ["layers.0.experts.weight", "layers.0.experts.scale"]
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(evaluate(graph, (X,), parameters), model(X))


def test_registered_module_is_split_by_its_annotation(other):
    model = model_of(Other)
    graph = ss.capture(model, (X,))
    assert not graph.opaque
    op = experts_of(graph)[0]
    assert str(op.annotation) == "b h^, w0_3^ w1_6^ w2_6^, w0_3^ -> b h^"
    values = values_of(graph, (X,), dict(model.named_parameters()))
    check_splits(op, [values[t] for t in op.inputs])


def test_registered_module_with_other_inputs_raises_capture_error():
    ss.register_module("tests.*.Other", "b h^, b h^ -> b h^")
    try:
        with pytest.raises(ss.CaptureError, match=r"Other takes 1 tensors, .* an operand for each"):
            ss.capture(model_of(Other), (X,))
    finally:
        front_end.REGISTERED_MODULES.clear()


@pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")
def test_known_library_module_with_other_inputs_is_opaque(monkeypatch):
    monkeypatch.setitem(front_end.KNOWN_MODULES, "tests.*.Other", "b h^, b h^ -> b h^")
    assert len(captured(model_of(Other)).opaque) == 2


def test_module_annotation_that_does_not_fit_is_rejected():
    ss.register_module(Other, "b h^ -> h^ b")
    try:
        with pytest.raises(ss.CaptureError, match=r"layers.0.experts.*does not fit|do not say"):
            ss.capture(model_of(Other), (X,))
    finally:
        front_end.REGISTERED_MODULES.clear()
    with pytest.raises(ss.AnnotationError):
        ss.register_module(Other, "b h^")


def test_opaque_module_may_take_and_return_named_values():
    class Uses(Model):
        def forward(self, x):
            made = self.layers[0]["experts"](rows=x, factor=2.0)
            assert made["none"] is None
            return (made["rows"] + made["sums"][:, None] * made["one"]).pow(2).mean()

    torch.manual_seed(0)
    model = Uses(Named)
    graph = captured(model)
    (op,) = graph.opaque
    assert [t.shape for t in op.outputs] == [(8, WIDTH), (8,)]
    torch.testing.assert_close(
        evaluate(graph, (X,), dict(model.named_parameters())), model(X), rtol=1e-12, atol=0
    )


class Rows(nn.Module):
    """Selects rows by their values; the module around it sums them to a fixed shape."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.inner = Rows(False) if around else None

    def forward(self, x):
        return x[x.sum(1) > 0] if self.inner is None else self.inner(x).sum(0)


def test_enclosing_module_is_opaque_if_inner_result_shapes_depend_on_values():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), nn.Sequential(Rows(True)), Total())
    graph = captured(model)
    assert [op.module for op in graph.opaque] == ["1.0"]


class Total(nn.Module):
    def forward(self, x):
        return x.sum()


def test_value_dependent_result_shape_without_enclosing_module_is_rejected():
    with pytest.raises(
        ss.CaptureError, match=r"Rows\) .* It cannot be one op: .* depend on values"
    ):
        ss.capture(nn.Sequential(Rows(False), Total()), (X,))


class Packs(nn.Module):
    def forward(self, x):
        return pack_padded_sequence(x, [2, 1], batch_first=True).data.sum()


def test_sequence_packing_in_the_top_level_model_is_rejected():
    with pytest.raises(ss.CaptureError, match=r"in a module of their own.*total_length="):
        ss.capture(Packs(), (torch.zeros(2, 3, 4),))


def test_error_inside_a_module_raises_capture_error_with_the_module_path():
    class Wrong(Experts):
        def forward(self, x):
            return x @ self.weight[0][:2]

    with pytest.raises(ss.CaptureError, match=r"follow module 'layers.0.experts' \(Wrong\)"):
        ss.capture(model_of(Wrong), (X,))


@pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")
@pytest.mark.parametrize("name, kind", [*zip(PLANS_OF, cycle([Experts, Other]))])
def test_module_ops_train_as_in_torch_under_several_plans(name, kind, tmp_path, other):
    model = model_of(kind)
    program = compiled(ss.capture(model, (X,)), name)
    assert ("opaque    Experts in layers.*" in program.summary()) == (kind is Experts)
    assert ss.simulate(program, profile=profile_of("a100")).secs > 0
    samples, generator = 8 * program.plan.num_microbatches, torch.Generator().manual_seed(2)
    batches = [torch.randn(samples, WIDTH, dtype=X.dtype, generator=generator) for _ in range(3)]
    check_program(program, model, batches, tmp_path)


class OneOfTwo(nn.Module):
    """Two linear maps, of which the forward calls only the first."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=X.dtype) for _ in range(2))

    def forward(self, x):
        return self.maps[int(x.square().sum() < 0)](x)


@pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")
@pytest.mark.parametrize("name", ["data_parallel", "zero3"])
def test_parameters_unused_by_an_opaque_module_have_zero_gradients(name, tmp_path):
    program = compiled(ss.capture(nn.Sequential(OneOfTwo(), Total()), (X,)), name)

    def grads(trainer):
        trainer.step(X)
        return {key: p.grad.abs().sum().item() for key, p in trainer.named_parameters()}

    sizes = [item for one in on_ranks(program, tmp_path, grads) for item in one.items()]
    assert sum(size for key, size in sizes if key.startswith("0.maps.0.")) > 0
    assert {size for key, size in sizes if key.startswith("0.maps.1.")} == {0}


def test_program_folder_contains_the_called_modules(tmp_path, monkeypatch):
    graph = captured(model_of())
    compiled(graph, "data_parallel").save(tmp_path)
    (key,) = {key for op in graph.ops for key in op.modules}
    monkeypatch.setattr(run_time, "MODULES", {})
    run_time.load_modules((tmp_path / run_time.FILE).read_bytes())
    assert not run_time.MODULES, "nothing is unpickled that is not called"
    call = run_time.module_call(key)
    assert all(p.is_meta for p in call.skeleton.parameters())
    model = model_of().layers[0]["experts"]
    (found,) = call([X, model.weight, model.scale], [(8, WIDTH)])
    torch.testing.assert_close(found, model(X))


def test_module_that_cannot_be_pickled_is_not_saved(tmp_path, monkeypatch):
    class Local(Experts):
        pass

    graph = captured(model_of(Local))
    keys = {key for op in graph.ops for key in op.modules}
    run_time.save_modules(tmp_path, keys)
    assert not [*Path(tmp_path).iterdir()]
    monkeypatch.setattr(run_time, "MODULES", {})
    with pytest.raises(ss.PlanError, match=r"Local.* could not be pickled .* top of a module"):
        run_time.call_module(keys.pop(), (X,), ((8, WIDTH),))


def test_module_results_of_unexpected_shapes_raise_plan_error():
    graph = captured(model_of())
    call = run_time.MODULES[graph.opaque[0].modules[0]]
    model = model_of().layers[0]["experts"]
    with pytest.raises(ss.PlanError, match=r"Experts returns \[\[8, 6\]\], and returned \[\[4, 6"):
        call([X, model.weight, model.scale], [(4, WIDTH)])


def test_estimated_memory_covers_the_bytes_kept_at_the_capture():
    op = captured(model_of()).opaque[0]
    memory = op_memory(ss.Part(op))
    call = run_time.MODULES[op.modules[0]]
    kept = round(call.kept_bytes * X.nbytes)
    # Besides its operands, autograd keeps the rows of each expert. Together they are all rows.
    assert kept >= X.nbytes
    assert memory.kept_bytes >= kept
    assert memory.backward_bytes >= memory.kept_bytes
