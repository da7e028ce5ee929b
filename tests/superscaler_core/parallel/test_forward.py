"""A parallel model that is called returns what the model itself returns in eval mode."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import superscaler_core as ss
from tests.covering import each_value
from tests.superscaler_core.parallel.threads import on_threads


class Several(NamedTuple):
    scores: Tensor
    best: Tensor
    extra: dict[str, Any]


class Net(nn.Module):
    """It returns a loss where it gets targets, and otherwise what the loss is of."""

    def __init__(self, form: str = "several") -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(),
            nn.Linear(8, 4),
        )  # fmt: skip
        self.form = form

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.body(x)
        if targets is not None:
            return nn.functional.cross_entropy(scores, targets)
        if self.form == "tensor":
            return scores
        best = scores.argmax(-1)
        return Several(scores, best, {"is large": scores > 0, "name": "net", "twice": [scores * 2]})


def net(form: str = "several") -> Net:
    torch.manual_seed(0)
    return Net(form)


X, TARGETS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
PLANS = {
    "data_parallel": 3, "zero3": 2, "megatron": 2, "one_f_one_b:microbatches=2": 2,
    "hybrid:tp=2,pp=2,microbatches=2": 4,
}  # fmt: skip


def assert_same(found: Any, expected: Any) -> None:
    one, form = pytree.tree_flatten(found)
    other, like = pytree.tree_flatten(expected)
    assert form == like
    for a, b in zip(one, other, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert a == b


@each_value(plan=PLANS, form=["several", "tensor"])
def test_call_returns_what_the_model_returns_before_and_after_a_step(plan, form):
    model = net(form).eval()
    with torch.no_grad():
        expected = model(X)
        narrow = model(X[:3])

    def work(parallel: ss.Parallel) -> Any:
        found = [parallel(X), parallel(x=X[:3])]
        assert not found[0][0].requires_grad
        return found

    for found in on_threads(
        net(form), {"x": X, "targets": TARGETS}, PLANS[plan], work, plan=plan
    ).values():
        assert_same(found[0], expected)
        assert_same(found[1], narrow)


def test_call_reads_what_steps_have_trained():
    model = net("tensor").eval()

    def work(parallel: ss.Parallel) -> Tensor:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        first = parallel(X)
        parallel.step(X, TARGETS)
        optimizer.step()
        assert not torch.equal(parallel(X), first)
        return parallel(X)

    found = on_threads(model, {"x": X, "targets": TARGETS}, 2, work, plan="zero3")
    other = net("tensor").eval()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(X, TARGETS).backward()
    optimizer.step()
    torch.testing.assert_close(found[1], other(X).detach(), rtol=1e-5, atol=1e-6)


def test_ranks_with_samples_of_their_own_get_the_outputs_of_these():
    model = net().eval()

    def work(parallel: ss.Parallel) -> Several:
        own = slice(0, 5) if parallel.trainer.rank == 0 else slice(5, 8)
        return parallel(X[own])

    found = on_threads(
        model, {"x": X[:4], "targets": TARGETS[:4]}, 2, work, batch=ss.Batch(kind="local")
    )
    with torch.no_grad():
        torch.testing.assert_close(found[0].scores, model(X[:5]).scores)
        torch.testing.assert_close(found[1].best, model(X[5:]).best)


def test_model_with_a_whole_loss_returns_its_features():
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x)

    model = Features()
    parallel = ss.parallelize(
        model, kwargs={"x": X}, plan="accumulate:microbatches=2",
        whole_loss=lambda y: y.mean(0).square().sum(),
    )  # fmt: skip
    parallel.step(X)
    torch.testing.assert_close(parallel(X), model(X).detach())


def test_call_that_returns_no_tensor_is_refused():
    class Says(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 4)

        def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
            return "nothing" if targets is None else self.line(x).square().mean()

    with pytest.raises(ss.PlanError, match="returns no tensor for this call"):
        on_threads(
            Says(), {"x": X, "targets": TARGETS}, 2, lambda parallel: parallel(X), plan="zero3"
        )


def test_recorded_outputs_and_caches_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=32,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), torch.arange(16).view(2, 8)

    def work(parallel: ss.Parallel) -> Any:
        with pytest.raises(ss.PlanError, match="returns a DynamicCache for this call"):
            parallel(input_ids=ids, use_cache=True)
        return parallel(input_ids=ids, output_hidden_states=True).hidden_states

    found = on_threads(model, {"input_ids": ids, "labels": ids}, 2, work)[0]
    expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach())


@pytest.mark.parametrize(
    ("plan", "num"),
    [("data_parallel", 2), ("megatron", 2), ("hybrid:tp=2,pp=2,microbatches=2", 4)],
)
def test_shards_of_all_ranks_are_the_outputs(plan, num):
    model = net().eval()
    with torch.no_grad():
        expected = model(X)

    def work(parallel: ss.Parallel) -> Several:
        return parallel.shards(X)

    found = on_threads(model, {"x": X, "targets": TARGETS}, num, work, plan=plan)
    made, seen = torch.zeros_like(expected.scores), torch.zeros_like(expected.scores)
    for shards in found.values():
        for box, piece in () if shards.scores is None else shards.scores.pieces:
            at = tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
            made[at], seen[at] = piece, 1.0
    torch.testing.assert_close(made, expected.scores, rtol=1e-5, atol=1e-6)
    assert seen.all()
    if plan == "data_parallel":
        assert [shards.scores.pieces[0][1].shape[0] for shards in found.values()] == [4, 4]
    assert found[num - 1].extra["name"] == "net"
