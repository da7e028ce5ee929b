"""Sample flow: the mean over microbatches' graphs is the loss of the whole batch, or is refused."""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import superscaler_core as ss
from superscaler_core.parallel import Programs, SProgram
from superscaler_core.parallel.totals import totals_of
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core.parallel.threads import on_threads

WORDS, SAMPLES, LENGTH = 11, 12, 5


class Loss(nn.Module):
    """A small language model with one of many losses."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head, self.how = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS), how
        self.register_buffer("weight", torch.arange(1.0, WORDS + 1))

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor, num: Tensor) -> Tensor:
        x = self.table(tokens).tanh()
        scores, wanted = self.head(x).flatten(0, 1), labels.flatten()
        each = F.cross_entropy(scores, wanted, reduction="none")
        masked = each * mask.flatten()
        found: Tensor = {
            "mean": lambda: F.cross_entropy(scores, wanted),
            "smoothed": lambda: F.cross_entropy(scores, wanted, label_smoothing=0.1),
            "weighted": lambda: F.cross_entropy(scores, wanted, weight=self.weight),
            "ignoring": lambda: F.cross_entropy(
                scores, wanted.clamp(min=-1).masked_fill(wanted == 3, -1), ignore_index=-1
            ),
            "nll": lambda: F.nll_loss(scores.log_softmax(-1), wanted),
            "masked": lambda: masked.sum() / mask.sum(),
            "clamped": lambda: masked.sum() / mask.sum().clamp(min=1e3),
            "mean of masked": lambda: masked.mean() / mask.mean(),
            "counted": lambda: each.sum() / (labels != -100).sum(),
            "items": lambda: each.sum() / num,
            "sum": lambda: each.sum(),
            "by size": lambda: each.sum() / len(tokens),
            "by elements": lambda: (each / each.numel()).sum(),
            "samples": lambda: (masked.view(mask.shape).sum(1) / mask.sum(1)).mean(),
            "normalized": lambda: (mask / mask.sum()).flatten().dot(each),
            "two": lambda: F.cross_entropy(scores, wanted) + 0.1 * x.square().mean(),
            "decay": lambda: F.cross_entropy(scores, wanted) + self.table.weight.square().sum(),
            "sum and mean": lambda: each.sum() + x.square().mean() + 1.0,
            "twice": lambda: torch.stack([each.mean(), masked.sum() / mask.sum()]).sum(),
            "by key": lambda: (F.cross_entropy(scores, wanted) * self.weight).mean(),
            "two halves": lambda: torch.cat([x, 2 * x]).square().mean(),
            "one more": lambda: each.sum() / ((labels != -100).sum() + 1),
            "repeated": lambda: (
                torch.cat([self.table.weight[None, :1].expand(len(tokens), 1, 6), x], 1)
                .square()
                .mean()
            ),
            "heads": lambda: self.heads(x).square().mean(),
            "longest": lambda: each.mean() / (labels != -100).sum(1).max(),
            "any": lambda: each.mean() * (labels == 3).any(),
            "pairs": lambda: (x.mean(1) @ x.mean(1).T).logsumexp(1).mean(),
            "softmax": lambda: x.mean(1).softmax(0).square().sum(),
            "centered": lambda: (x - x.mean((0, 1))).square().mean(),
            "root": lambda: x.square().mean().sqrt(),
            "number": lambda: each.mean() ** len(tokens),
            "order": lambda: (x.mean((1, 2)) * torch.arange(len(tokens))).mean(),
            "gate": lambda: masked.sum() / x.abs().sum(),
        }[self.how]()
        return found

    def heads(self, x: Tensor) -> Tensor:
        """Attention whose heads are samples of a batched product, as in many models."""
        num, length, _ = x.shape
        q = x.view(num, length, 2, 3).transpose(1, 2).reshape(num * 2, length, 3)
        out = torch.bmm(torch.bmm(q, q.transpose(1, 2)).softmax(-1), q)
        return out.view(num, 2, length, 3).transpose(1, 2).reshape(num * length, 6)


WHOLE = [
    "mean", "smoothed", "weighted", "ignoring", "nll", "masked", "clamped", "mean of masked",
    "counted", "items", "sum", "by size", "by elements", "samples", "normalized", "two", "decay",
    "sum and mean", "twice", "by key", "two halves", "one more",
    "repeated", "heads",
]  # fmt: skip
MIXED = {
    "pairs": "computes with pairs of samples",
    "softmax": "softmax computes results of several samples together",
    "centered": "computes single samples with mean, a sum over all samples",
    "root": "sqrt is not linear in mean",
    "number": "pow is not linear in mean",
    "order": "other values for another number of samples",
    "longest": "max computes results of several samples together",
    "any": "any computes results of several samples together",
    "gate": "divides by .*, which parameters change",
}


def batch() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(WORDS, (2, SAMPLES, LENGTH), generator=random)
    for sample in range(SAMPLES):
        labels[sample, : sample * LENGTH // SAMPLES] = -100
    mask = torch.rand(SAMPLES, LENGTH, generator=random, dtype=torch.float64)
    mask *= torch.arange(1, SAMPLES + 1)[:, None]
    return {"tokens": tokens, "labels": labels, "mask": mask, "num": torch.tensor(37.0).double()}


def model(how: str) -> Loss:
    torch.manual_seed(0)
    return Loss(how).double()


def graph_of(module: nn.Module, given: dict[str, Tensor], num: int, **options: Any) -> ss.Graph:
    programs = Programs(module, SProgram.of("accumulate"), 1, **options)
    return programs._graph(programs.call((), given), num, frozenset())


@pytest.mark.parametrize("how, num", [*zip(WHOLE, cycle([2, 12, 3]))])
def test_mean_of_microbatches_is_the_loss_of_the_whole_batch(how: str, num: int) -> None:
    module, given = model(how), batch()
    graph = graph_of(module, given, num)
    whole = {**given, **totals_of(graph, given, num)}
    loss = torch.zeros((), dtype=torch.float64)
    for mb in range(num):
        inputs = {
            t.name: x if dim is None else x.narrow(dim, mb * t.shape[dim], t.shape[dim])
            for t in graph.batch_inputs
            for x, dim in [(whole[t.name], graph.samples_dim(t))]
        }
        loss = loss + evaluate(graph, inputs, dict(module.named_parameters())) / num
    parameters = [*module.parameters()]
    mine = torch.autograd.grad(loss, parameters, allow_unused=True)
    wanted = module(**given)
    theirs = torch.autograd.grad(wanted, parameters, allow_unused=True)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("how, num", [*zip(MIXED, cycle([2, 12]))])
def test_loss_that_mixes_samples_is_refused_by_op_and_input(how: str, num: int) -> None:
    with pytest.raises(ss.PlanError, match=MIXED[how]) as error:
        graph_of(model(how), batch(), num)
    assert re.search(r"\(of .*(tokens|labels)", str(error.value))


@pytest.mark.parametrize("how", ["samples", "by size", "two halves"])
def test_graph_of_samples_that_count_alike_is_the_captured_one(how: str) -> None:
    module, given = model(how), batch()
    graph = graph_of(module, given, 3)
    part = {n: x if x.dim() == 0 else x[: SAMPLES // 3] for n, x in given.items()}
    assert str(graph) == str(ss.capture(module, kwargs=part))
    assert not graph.totals


class OverNorm(torch.autograd.Function):
    """Divides gradients by their norm over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm()


class TimesNumber(OverNorm):
    """Multiplies gradients by the number of samples."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * len(grads[0])


class Reversed(OverNorm):
    """The gradient of ``forward``, sample by sample."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].flip(-1).cumsum(-1).flip(-1)


class Top(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        values, indices = x.topk(3, -1)
        return torch.zeros_like(x).scatter(-1, indices, values)


class Layer(nn.Module):
    """A linear layer with what a ``how`` adds, which does not work sample by sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.top = how, nn.Linear(6, 6), Top()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.words = nn.Embedding(WORDS, 6, scale_grad_by_freq=how == "frequencies")
        self.register_buffer("num", torch.zeros(()))
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.norm = parametrizations.spectral_norm(nn.Linear(6, 6)) if how == "spectral" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).mean(1)
        z = self.layers[1](self.layers[0](self.layer(x)))
        if self.how == "top":
            z = F.normalize(self.top(z), dim=-1)
            return (z @ z.T).logsumexp(-1).mean()
        if self.how == "counter":
            self.num += 1
            z = z * self.num
        if self.how == "unread counter":
            self.num += 1
        if self.how == "teacher":
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(0.1 * self.layer.weight)
            z = z - self.teacher(x)
        of = {"norm": OverNorm, "number": TimesNumber, "alone": Reversed}.get(self.how)
        z = z if of is None else of.apply(z)
        z = z if self.norm is None else self.norm(z)
        return z.square().mean()


LAYERS = {
    "top": "computes with pairs of samples",
    "counter": "num is changed by the forward, so by every microbatch",
    "teacher": r"teacher.weight is changed by the forward, so by every microbatch",
    "spectral": "is changed by the forward, so by every microbatch",
    "norm": "OverNorm computes gradients of several samples together",
    "number": "TimesNumber computes gradients with the number of samples",
    "frequencies": "computes gradients of several samples together",
}


@pytest.mark.filterwarnings("ignore::superscaler_core.errors.OpaqueWarning")
@pytest.mark.parametrize("how", LAYERS)
def test_layer_that_does_not_work_sample_by_sample_is_refused(how: str) -> None:
    torch.manual_seed(0)
    given = {"tokens": batch()["tokens"]}
    with pytest.raises(ss.PlanError, match=LAYERS[how]):
        graph_of(Layer(how).double(), given, 2)


@pytest.mark.filterwarnings("ignore::superscaler_core.errors.OpaqueWarning")
@pytest.mark.parametrize("how", ["none", "alone", "unread counter"])
def test_layer_that_works_sample_by_sample_trains_as_one_batch(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, given = Layer(how).double(), {"tokens": batch()["tokens"]}
    alone = deepcopy(model)
    want = alone(**given)
    want.backward()
    parallel = ss.parallelize(model, kwargs=given, plan="accumulate:microbatches=2")
    torch.testing.assert_close(parallel.step(**given), want.detach(), rtol=1e-12, atol=0)
    for name, parameter in parallel.named_parameters():
        grad = alone.get_parameter(name).grad
        if grad is not None:
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-14)
    said = "2 microbatches: num: changed once for each, not once in a step" in caplog.text
    assert said == (how == "unread counter")


class TimeFirst(nn.Module):
    """A recurrent network whose inputs are ``[time, samples, width]``."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.first, self.last = nn.LSTM(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.first(self.maps(x))[0]).squeeze(-1) - y).flatten().square().mean()


class Rows(nn.Module):
    """Attention to a table that has as many rows as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.last((self.query(x) @ table.T).softmax(-1) @ table).square().mean()


def _case(name: str) -> tuple[nn.Module, dict[str, Tensor], ss.Batch]:
    torch.manual_seed(1)
    random = torch.Generator().manual_seed(1)
    shapes = {"time": {"x": (3, 8, 4), "y": (3, 8)}, "table": {"x": (8, 4), "table": (8, 4)}}[name]
    given = {n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in shapes.items()}
    module: nn.Module = TimeFirst() if name == "time" else Rows()
    return module.double(), given, ss.Batch({"x": 1, "y": 1} if name == "time" else {"table": None})


@pytest.mark.parametrize(
    "name, plan, num_ranks",
    [
        ("time", "one_f_one_b:microbatches=4", 2),
        ("table", "chimera:microbatches=4", 2),
        ("table", "megatron", 2),
        ("two", "hybrid:tp=2,pp=2,microbatches=2", 4),
        ("weighted", "gpipe:microbatches=3", 2),
        ("counted", "zero3", 2),
    ],
)
def test_steps_are_those_of_one_device(name: str, plan: str, num_ranks: int) -> None:
    if name in ("time", "table"):
        module, given, said = _case(name)
    else:
        module, given, said = model(name), batch(), ss.Batch()

    def work(parallel: ss.Parallel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        losses = parallel.step(**given), parallel.evaluate(**given)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter -= 0 if parameter.grad is None else parameter.grad
        return *losses, parallel.state_dict()

    found = on_threads(module, given, num_ranks, work, plan=plan, batch=said)
    loss = module(**given)
    loss.backward()
    for parameter in module.parameters():
        parameter.data -= parameter.grad
    for trained, evaluated, state in found.values():
        torch.testing.assert_close(trained, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(evaluated, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(state, dict(module.state_dict()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["time", "table"])
def test_samples_along_another_dim_are_told_apart(name: str) -> None:
    module, given, said = _case(name)
    with pytest.raises(ss.PlanError, match="samples"):
        graph_of(module, given, 2)
    assert graph_of(module, given, 2, batch=said).samples


class Normed(nn.Module):
    """A batch norm between two maps."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_of_microbatches_is_noted(
    tracks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    norm = nn.BatchNorm1d(6, track_running_stats=tracks)
    with caplog.at_level(logging.WARNING, "superscaler_core"):
        graph_of(Normed(norm), {"x": torch.randn(8, 4)}, 2)
    assert "BatchNorm1d normalizes every microbatch by its own statistics" in caplog.text


def test_synchronised_batch_norm_of_microbatches_is_refused() -> None:
    with pytest.raises(ss.PlanError, match=r"computes single samples with norm\.mean"):
        graph_of(Normed(nn.SyncBatchNorm(6)), {"x": torch.randn(8, 4)}, 2)
