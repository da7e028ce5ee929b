"""Writes in place: programs of views and writes have torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.run.evaluate import evaluate

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Program(nn.Module):
    """A module whose loss is ``run`` of an activation and of the input."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        # The sum has a gradient even if ``run`` overwrites everything else.
        return self.run(x.clone() @ self.weight, x) + self.weight.sum()


def check(run: Callable[[Tensor, Tensor], Tensor]) -> ss.Graph:
    """Check that the graph has torch's loss and gradients, and that the input does not change."""
    model, x = Program(run), X.clone()
    graph = ss.capture(model, (x,))
    found = evaluate(graph, (x,), {"weight": model.weight})
    assert torch.equal(x, X)
    expected = model(X.clone())
    grads = [torch.autograd.grad(loss, model.weight)[0] for loss in (found, expected)]
    torch.testing.assert_close([found, grads[0]], [expected, grads[1]], rtol=1e-12, atol=1e-12)
    return graph


def squared(*tensors: Tensor) -> Tensor:
    return sum(((i + 2) * (t * t).sum() for i, t in enumerate(tensors)), torch.zeros(()))


# --- by example ---------------------------------------------------------------------------------


def write_to_a_view(h: Tensor, x: Tensor) -> Tensor:
    h.view(24).mul_(2)
    return squared(h)


def view_is_read_after_a_write(h: Tensor, x: Tensor) -> Tensor:
    view = h.view(24)
    h.mul_(2)
    return squared(view, h.relu_())


def pieces_of_a_buffer(h: Tensor, x: Tensor) -> Tensor:
    made = torch.zeros(4, 8, dtype=x.dtype)
    made[:, :6] = h
    made[:, 6] += x[:, 0]
    made[1, 7] = 3
    return squared(made)


def numbered_rows(h: Tensor, x: Tensor) -> Tensor:
    made = h * 1
    made[torch.tensor([0, 2])] = x[1]
    made[:, torch.tensor([1, 1])] += 1
    made[torch.tensor([1, 3]), torch.tensor([5, 0])] = 7.0
    made[x > 0.5] = 0.25
    return squared(made)


def the_input(h: Tensor, x: Tensor) -> Tensor:
    h = h * x.mean()
    return squared(h, x[:, 1:].mul_(2), h.sum() * x)


def wider_operand(h: Tensor, x: Tensor) -> Tensor:
    made = h.float()
    made.add_(x)
    return squared(made.double())


def others_of_a_batch(h: Tensor, x: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made.index_add_(1, torch.tensor([0, 0, 5]), h[:, :3])
    made.index_copy_(0, torch.tensor([2]), x[:1])
    made.index_fill_(1, torch.tensor([4]), -1)
    made.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 5.0)
    return squared(made, h)


def without_grad(h: Tensor, x: Tensor) -> Tensor:
    scale = torch.ones(6, dtype=x.dtype)
    with torch.no_grad():
        scale[2:].mul_(0.5).add_(h.mean(0)[2:], alpha=0.1)
    return squared(h * scale)


def view_made_anew_without_grad(h: Tensor, x: Tensor) -> Tensor:
    view = h.view(24)
    h.mul_(2)
    with torch.no_grad():
        top = view.max()
    return squared(view / top)


def detached_before_a_write(h: Tensor, x: Tensor) -> Tensor:
    seen = h.detach()
    h.mul_(2)
    return squared(seen * h)


def passed_on_by_dropout(h: Tensor, x: Tensor) -> Tensor:
    same = F.dropout(h, 0.5, training=False)
    same += 1
    F.dropout2d(x[None, None], 0.5, training=False)[0, 0, 1].mul_(2)
    return squared(h * same, x)


@pytest.mark.parametrize(
    "run",
    [
        write_to_a_view, view_is_read_after_a_write, pieces_of_a_buffer, numbered_rows, the_input,
        wider_operand, others_of_a_batch, without_grad, view_made_anew_without_grad,
        detached_before_a_write, passed_on_by_dropout,
    ],
)  # fmt: skip
def test_in_place_writes_have_the_values_and_gradients_of_torch(run) -> None:
    check(run)


def test_assigning_an_updated_view_to_itself_adds_no_op() -> None:
    def run(h: Tensor, x: Tensor) -> Tensor:
        h[:, 1:3] *= 2  # torch multiplies in place, then assigns the product to h[:, 1:3]
        return squared(h)

    assert [op.kind for op in check(run).ops][:4] == ["matmul", "slice", "mul", "slice_scatter"]


def clamped_without_grad(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        h[0].clamp_(-1, 1)
    return squared(h)


def detached_and_written(h: Tensor, x: Tensor) -> Tensor:
    h.detach().mul_(2)
    return squared(h)


def added_to_what_was_detached(h: Tensor, x: Tensor) -> Tensor:
    scale = torch.ones(4, 6, dtype=x.dtype)
    scale.detach().add_(h)
    return squared(scale * h)


def of_an_expanded_tensor(h: Tensor, x: Tensor) -> Tensor:
    x[:, :1].expand(4, 1).add_(1)
    return squared(h, x)


def of_another_dtype(h: Tensor, x: Tensor) -> Tensor:
    x.view(torch.int64).bitwise_and_(-2)
    return squared(h, x)


@pytest.mark.parametrize(
    "run, message",
    [
        (clamped_without_grad, r"clamp_.* writes in place, without gradient, what has one; use"),
        (detached_and_written, r"mul_.* writes in place, without gradient, what has one"),
        (added_to_what_was_detached, "writes in place, with a gradient, what was detached"),
        (of_an_expanded_tensor, "writes in place what other tensors share memory with"),
        (of_another_dtype, "writes in place what other tensors share memory with"),
    ],
)
def test_unsupported_in_place_writes_raise_capture_error(run, message) -> None:
    with pytest.raises(ss.CaptureError, match=message):
        ss.capture(Program(run), (X.clone(),))


# --- random programs ----------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda t: t,
    "rows": lambda t: t[1:3],
    "every second": lambda t: t[..., ::2],
    "row": lambda t: t[1],
    "column": lambda t: t[..., 0],
    "flat": lambda t: t.view(-1) if t.is_contiguous() else t,
    "turned": lambda t: t.transpose(0, -1),
    "permuted": lambda t: t.permute(*range(1, t.dim()), 0),
    "one more": lambda t: t.unsqueeze(0),
    "narrow": lambda t: t.narrow(-1, 0, 1),
}
CUTS: dict[str, Callable[[Tensor], Tensor]] = {"detached": lambda t: t.detach()}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul": lambda t, o: t.mul_(1.5),
    "relu": lambda t, o: t.relu_(),
    "add": lambda t, o: t.add_(o.sum()),
    "copy": lambda t, o: t.copy_(o.mean() + torch.ones(t.shape, dtype=t.dtype)),
    "fill": lambda t, o: t.fill_(0.5),
    "assign": lambda t, o: t.__setitem__(0, o.mean()),
    "add and assign": lambda t, o: t.__setitem__(slice(0, 1), t[0:1].__iadd__(2)),
    "mask": lambda t, o: t.masked_fill_(t > 0.3, 0.1),
}


def steps(views: list[str]) -> st.SearchStrategy[list[tuple[int, int, str, bool]]]:
    step = st.tuples(
        st.integers(0, 5), st.integers(0, 5), st.sampled_from([*views, *WRITES]), st.booleans()
    )
    return st.lists(step, min_size=2, max_size=7)


def program_of(drawn: list[tuple[int, int, str, bool]], grads: bool) -> Callable[..., Tensor]:
    def run(h: Tensor, x: Tensor) -> Tensor:
        tensors = [h * 1, torch.ones(4, 6, dtype=h.dtype), x * 1]
        for at, other, what, with_grad in drawn:
            one, two = tensors[at % len(tensors)], tensors[other % len(tensors)]
            with nullcontext() if with_grad or not grads else torch.no_grad():
                if what in WRITES:
                    if one.dim():
                        WRITES[what](one, two)
                elif one.dim():
                    tensors.append((VIEWS | CUTS)[what](one))
        return squared(*tensors)

    return run


def torch_trains(run: Callable[..., Tensor]) -> bool:
    """Whether torch computes a gradient: it fails if a value that it needs was overwritten."""
    model = Program(run)
    try:
        torch.autograd.grad(model(X.clone()), model.weight)
    except (RuntimeError, IndexError):
        return False
    return True


@settings(max_examples=18, deadline=None)
@given(steps([*VIEWS, *CUTS]), st.booleans())
def test_random_programs_of_views_and_writes_equal_torch_or_are_rejected(drawn, grads) -> None:
    run = program_of(drawn, grads)
    assume(torch_trains(run))
    try:
        check(run)
    except ss.CaptureError as error:
        event("refused")
        if "writes in place" not in str(error):
            raise
