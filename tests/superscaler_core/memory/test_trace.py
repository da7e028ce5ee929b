"""Traces: equal calls are recorded once, and pieces of memory are freed with their last holder."""

from __future__ import annotations

import gc

import pytest
import torch

from superscaler_core.known import Known
from superscaler_core.memory import trace
from superscaler_core.memory.account import Located, MemoryPiece, MemoryPool, layouts_of
from superscaler_core.memory.meta import Strided
from superscaler_core.memory.trace import Drop, Stretch, TracedCalls, TracedFunction, WeightGrad
from superscaler_core.program import Verb
from tests.superscaler_core.memory.test_lowering import compiled, forget


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACES", Known(trace.MAX_TRACES))
    forget(monkeypatch)


def product(_: int, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x @ weight).exp(),)


def located(*shape: int, is_trained: bool = False) -> Located:
    form = Strided.new(shape, "float32", is_trained=is_trained)
    return Located(MemoryPiece(form.num_bytes, None), form)


def test_trace_of_a_product_keeps_what_its_backward_reads() -> None:
    """Pieces 0 and 1 are given, 2 is the result, which exp keeps, 3 the emptied leaf, 4 and 5 are
    gradients.
    """
    calls = TracedCalls(TracedFunction("product", lambda: product, num_inputs=1))
    given = layouts_of([located(6, 10), located(10, 14, is_trained=True)])
    forward = calls.trace(Verb.FORWARD, given)
    size = 6 * 14 * 4
    assert forward.happenings == (Stretch(2 * size, 0, (size, 4)),)
    assert [lying.number for lying in forward.results] == [2]
    assert forward.kept == (0, 1, 2, 3)
    back = calls.trace(Verb.BACKWARD, layouts_of([located(6, 14)]))
    assert WeightGrad(1) in back.happenings
    assert {what.number for what in back.happenings if isinstance(what, Drop)} == {0, 1, 2, 3}
    assert [lying.number for lying in back.results] == [5]
    assert back.kept == ()


@pytest.mark.usefixtures("nothing_known")
def test_backward_is_traced_although_its_forward_was_known() -> None:
    given = layouts_of([located(6, 10), located(10, 14, is_trained=True)])
    found = []
    for grads in (located(6, 14), located(6, 14), located(6, 1)):
        calls = TracedCalls(TracedFunction("product", lambda: product, num_inputs=1))
        calls.trace(Verb.FORWARD, given)
        lying = Located(grads.piece, grads.form._replace(shape=(6, 14), stride=(1, 0)))
        found.append(calls.trace(Verb.BACKWARD, layouts_of([lying])))
    assert len(trace._TRACES) == 3
    assert found[0] is found[1]


def test_collector_changes_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that holds a result lives until the end of the call, however often is collected."""

    def cyclic(_: int, x: torch.Tensor) -> tuple[torch.Tensor]:
        held = [x + 1]
        held.append(held)  # type: ignore[arg-type]
        del held
        for _number in range(3000):
            _list: list[object] = [[]]
        return (x * 2,)

    def traced(threshold: int) -> trace.Trace:
        monkeypatch.setattr(trace, "_TRACES", Known(trace.MAX_TRACES))
        before = gc.get_threshold()
        gc.set_threshold(threshold)
        try:
            calls = TracedCalls(TracedFunction("cyclic", lambda: cyclic))
            return calls.trace(Verb.COMPUTE, layouts_of([located(6, 10)]))
        finally:
            gc.set_threshold(*before)

    assert traced(1) == traced(100_000)


@pytest.mark.usefixtures("nothing_known")
def test_equal_layers_are_traced_once() -> None:
    """A model with twice as many layers has the same number of different calls."""
    _ = compiled("megatron", layers=4).memory
    count = len(trace._TRACES)
    assert count > 0
    _ = compiled("megatron", layers=8).memory
    assert len(trace._TRACES) == count


@pytest.mark.usefixtures("nothing_known")
def test_number_of_remembered_traces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled("megatron").memory
    forget(monkeypatch)
    monkeypatch.setattr(trace, "_TRACES", Known(2))
    assert compiled("megatron").memory == expected
    assert len(trace._TRACES) == 2


# --- pieces of memory ---------------------------------------------------------------------------


def test_piece_is_freed_with_its_last_holder_and_its_copy_after_it() -> None:
    pool, host = MemoryPool(), MemoryPool()
    piece = MemoryPiece(24, pool).hold().hold()
    copy = piece.copied(host).hold()
    assert piece.copied(host) is copy
    assert (pool.now_bytes, host.now_bytes) == (24, 24)
    piece.release()
    assert pool.now_bytes == 24
    piece.release()
    assert (pool.now_bytes, host.now_bytes) == (0, 24)
    copy.release()
    assert host.now_bytes == 0


def test_tensors_made_from_layouts_keep_their_shared_storage() -> None:
    whole, other = located(4, 6), located(3, 1)
    part = Located(whole.piece, Strided.of(torch.empty(4, 6)[1:, ::2]))
    layouts = layouts_of([whole, part, None, other])
    assert layouts.sizes == (4 * 6 * 4, 3 * 4)
    first, second, nothing, third = layouts.made()
    assert nothing is None
    assert first is not None
    assert second is not None
    assert third is not None
    assert list(map(Strided.of, (first, second, third))) == [whole.form, part.form, other.form]
    assert first.untyped_storage() is second.untyped_storage()


def test_form_of_a_box_is_that_of_a_slice() -> None:
    x = torch.empty(6, 10, 14).transpose(0, 2)[1:]
    assert Strided.of(x).within(((2, 9), (0, 10), (5, 5))) == Strided.of(x[2:9, :, 5:5])
    assert Strided.of(x).within(None) == Strided.of(x)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (1, 5, 3)])
def test_form_of_a_new_tensor_is_that_of_torch(shape: tuple[int, ...]) -> None:
    assert Strided.new(shape, "bfloat16") == Strided.of(torch.empty(shape, dtype=torch.bfloat16))
