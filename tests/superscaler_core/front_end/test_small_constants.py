"""Constants of a graph stay small: ops compute large tensors from small constants."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import superscaler_core as ss
from superscaler_core.front_end import small_constants
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.parts import check_splits, values_of

NUM_TOKENS = 300


class Masked(nn.Module):
    """A loss of scores behind a mask of tokens by tokens."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.weight = mask, nn.Parameter(torch.randn(NUM_TOKENS, 4).double())

    def forward(self, x):
        scores = x @ self.weight @ self.weight.T
        return (scores * self.mask(scores)).softmax(-1).square().sum()


def causal(scores):
    places = torch.arange(NUM_TOKENS)
    return (places[None, :] <= places[:, None]) & (places[None, :] > places[:, None] - 9)


def ones(scores):
    return torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.float64) * 0.5


def ones_like(scores):
    return torch.full_like(scores, 0.5) + torch.zeros_like(scores)


def repeated(scores):
    return torch.arange(NUM_TOKENS).remainder(3)[:, None].expand(-1, NUM_TOKENS)


@pytest.mark.parametrize("mask", [causal, ones, ones_like, repeated])
def test_large_constants_are_computed_from_small_ones(mask, monkeypatch):
    monkeypatch.setattr(small_constants, "LIMIT_BYTES", 1 << 16)
    torch.manual_seed(0)
    model, x = Masked(mask), torch.randn(NUM_TOKENS, NUM_TOKENS).double() / 99
    graph = ss.capture(model, (x,))
    assert max(value.untyped_storage().nbytes() for value in graph.constants.values()) <= 2400
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(evaluate(graph, (x,), parameters), model(x), rtol=1e-12, atol=0)
    values = values_of(graph, (x,), parameters)
    for op in graph.ops:
        if not any(tensor.requires_grad for tensor in op.inputs):
            check_splits(op, [values[tensor] for tensor in op.inputs])


def test_constant_is_stored_without_its_repetitions():
    def mask(scores):
        places = torch.arange(NUM_TOKENS)[None, None, :].expand(4, NUM_TOKENS, -1)
        return (places <= places.transpose(1, 2)).double().sum(0)

    graph = ss.capture(Masked(mask), (torch.randn(NUM_TOKENS, NUM_TOKENS).double(),))
    assert [tuple(value.shape) for value in graph.constants.values()] == [(NUM_TOKENS,) * 2]

    def alike(scores):
        return torch.stack([torch.arange(NUM_TOKENS)] * NUM_TOKENS)

    graph = ss.capture(Masked(alike), (torch.randn(NUM_TOKENS, NUM_TOKENS).double(),))
    assert [tuple(value.shape) for value in graph.constants.values()] == [(1, NUM_TOKENS)]


def test_constants_that_stay_small_are_folded():
    model = Masked(lambda scores: F.pad(torch.arange(8.0).outer(torch.arange(3.0)), (1, 4)).sum())
    graph = ss.capture(model, (torch.randn(NUM_TOKENS, NUM_TOKENS).double(),))
    assert not any(t.kind == "constant" and t.shape for op in graph.ops for t in op.inputs)


def test_large_constant_without_a_rule_is_folded():
    model = Masked(lambda scores: torch.vander(torch.arange(1.0, NUM_TOKENS + 1) / 300))
    graph = ss.capture(model, (torch.randn(NUM_TOKENS, NUM_TOKENS).double(),))
    assert not graph.opaque
