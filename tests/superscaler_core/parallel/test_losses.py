"""A plan never changes the loss: what people train, under plans with microbatches, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.parallel.threads import on_threads

PLANS = ("accumulate:microbatches=2", "one_f_one_b:microbatches=4", "hybrid:tp=2,microbatches=2")
SIZE, WIDTH, WORDS = 8, 6, 11


class Towers(nn.Module):
    """Layers for two kinds of samples, and a loss of their results."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.loss = nn.Parameter(torch.tensor(0.7)), loss

    def forward(self, x: Tensor, y: Tensor, **more: Tensor) -> Tensor:
        for layer in self.left:
            x = layer(x).tanh()
        for layer in self.right:
            y = layer(y).tanh()
        return self.loss(x, y, self.scale, **more)


class Words(nn.Module):
    """Layers over words, and a loss of the scores."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head, self.loss = nn.Linear(WIDTH, WORDS), loss

    def forward(self, words: Tensor, **more: Tensor) -> Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.loss(self.head(x), words, **more)


# --- losses that mix samples ----------------------------------------------------------------------


def clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    scores = scale.exp() * F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def siglip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    scores = scale.exp() * F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T
    signs = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
    return -F.logsigmoid(signs * scores).sum() / len(scores)


def supcon(x: Tensor, y: Tensor, scale: Tensor, kinds: Tensor) -> Tensor:
    scores = (F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T).log_softmax(-1)
    same = (kinds[:, None] == kinds[None]).to(scores.dtype)
    return -(same * scores).sum() / same.sum()


# --- losses that are sums over samples, or sums over others ---------------------------------------


def label_mean(scores: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def masked_mean(scores: Tensor, words: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(scores.flatten(0, 1), words.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum().clamp(min=1)


def of_items(scores: Tensor, words: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    losses = F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return losses / num_items_in_batch


def ppo(scores: Tensor, words: Tensor, old: Tensor, gains: Tensor, mask: Tensor) -> Tensor:
    now = scores.log_softmax(-1).gather(-1, words[..., None])[..., 0]
    ratio = (now - old).exp()
    clipped = torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
    entropy = -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)
    return -((clipped + 0.01 * entropy) * mask).sum() / mask.sum()


def dpo(scores: Tensor, words: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """A sample is a pair: the chosen words, and behind them the rejected ones."""
    now = scores.log_softmax(-1).gather(-1, words[..., None])[..., 0]
    gains = ((now - old) * mask).unflatten(1, (2, -1)).sum(-1)
    return -F.logsigmoid(0.1 * (gains[:, 0] - gains[:, 1])).mean()


def kl(scores: Tensor, words: Tensor, teacher: Tensor) -> Tensor:
    given = teacher.log_softmax(-1).flatten(0, 1)
    return F.kl_div(scores.log_softmax(-1).flatten(0, 1), given, log_target=True,
                    reduction="batchmean")  # fmt: skip


MIXED: dict[str, Callable[..., Tensor]] = {"clip": clip, "siglip": siglip, "supcon": supcon}
SUMS: dict[str, Callable[..., Tensor]] = {
    "label mean": label_mean, "masked mean": masked_mean, "items in batch": of_items,
    "ppo": ppo, "dpo": dpo, "distillation": kl,
}  # fmt: skip


def model_of(loss: Callable[..., Tensor]) -> Any:
    torch.manual_seed(0)
    return (Towers if loss in MIXED.values() else Words)(loss).double()


def batch_of(loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Samples with very different numbers of labels: the last ones have none at all."""
    torch.manual_seed(1)
    if loss in MIXED.values():
        more = {"kinds": torch.arange(SIZE) % 3} if loss is supcon else {}
        x, y = torch.randn(2, SIZE, WIDTH, dtype=torch.float64)
        return {"x": x, "y": y, **more}
    words = torch.randint(WORDS, (SIZE, 4))
    mask = (torch.arange(4) < torch.tensor([4, 1, 3, 2, 2, 1, 0, 0])[:, None]).double()
    labels = words.masked_fill(mask == 0, -100)
    shape = words.shape
    every = {
        "labels": labels, "mask": mask, "num_items_in_batch": mask.sum(),
        "old": torch.randn(shape, dtype=torch.float64) - 2,
        "gains": torch.randn(shape, dtype=torch.float64),
        "teacher": torch.randn(*shape, WORDS, dtype=torch.float64),
    }  # fmt: skip
    names = loss.__code__.co_varnames[2 : loss.__code__.co_argcount]
    return {"words": words, **{name: every[name] for name in names}}


def check(loss: Callable[..., Tensor], plan: str) -> None:
    batch, alone = batch_of(loss), model_of(loss)
    want = alone(**batch)
    want.backward()

    def work(parallel: ss.Parallel) -> None:
        torch.testing.assert_close(parallel.step(**batch), want.detach(), rtol=1e-10, atol=0)
        torch.optim.SGD(parallel.parameters(), lr=0.1).step()
        for name, value in parallel.state_dict().items():
            torch.testing.assert_close(value, stepped[name], rtol=1e-10, atol=1e-13)

    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    stepped = alone.state_dict()
    on_threads(model_of(loss), batch, 2, work, plan=plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SUMS)
def test_loss_is_that_of_the_whole_batch(name: str, plan: str) -> None:
    check(SUMS[name], plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MIXED)
def test_loss_that_mixes_samples_is_refused_and_names_the_op(name: str, plan: str) -> None:
    with pytest.raises(ss.PlanError, match="loss of the whole batch is no sum over them"):
        check(MIXED[name], plan)


@pytest.mark.parametrize("plan", ["zero3:keep=block_inputs", "hybrid:tp=2,microbatches=1"])
@pytest.mark.parametrize("name", MIXED)
def test_loss_that_mixes_samples_is_trained_by_plans_without_microbatches(
    name: str, plan: str
) -> None:
    check(MIXED[name], plan)
