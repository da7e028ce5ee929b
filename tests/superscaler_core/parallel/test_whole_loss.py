"""``whole_loss``: losses that mix samples are those of the whole batch under plans that cut it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.front_end import ModelCall
from superscaler_core.parallel import SProgram
from superscaler_core.parallel.two_passes import TwoPasses
from superscaler_core.parallel.whole_loss import prepared
from superscaler_core.training import in_threads
from tests.superscaler_core.parallel.threads import ProgramsOfThreads

WIDTH = 6
PLANS = {"accumulate:microbatches=4": 2, "one_f_one_b:microbatches=2": 2,
         "hybrid:tp=2,microbatches=2,zero=1,keep=block_inputs": 4, "zero3": 2}  # fmt: skip


class Towers(nn.Module):
    """Two towers, a scale that is a parameter, and labels that are passed on."""

    def __init__(self, rate: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.drop = nn.Parameter(torch.tensor(0.7)), nn.Dropout(rate)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        for layer in self.left:
            x = self.drop(layer(x).tanh())
        x = self.norm(x)
        for layer in self.right:
            y = layer(y).tanh()
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        return {"x": x, "y": y, "scale": self.scale, "kinds": kinds}


def clip(found: dict[str, Tensor]) -> Tensor:
    scores = found["scale"].exp() * found["x"] @ found["y"].T
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def siglip(found: dict[str, Tensor]) -> Tensor:
    scores = found["scale"].exp() * found["x"] @ found["y"].T
    return -F.logsigmoid((2 * torch.eye(len(scores)) - 1) * scores).sum() / len(scores)


def supcon(found: dict[str, Tensor]) -> Tensor:
    scores = (found["x"] @ found["y"].T).log_softmax(-1)
    same = (found["kinds"][:, None] == found["kinds"][None]).to(scores.dtype)
    return -(same * scores).sum() / same.sum()


def towers(**options: Any) -> Any:
    torch.manual_seed(0)
    return Towers(**options).double()


def batch(size: int = 8, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(2, size, WIDTH, dtype=torch.float64)
    return {"x": x, "y": y, "kinds": torch.arange(size) % 3}


def on_ranks(
    model: Any, loss: Callable[..., Tensor], plan: str, num: int, work: Callable[[TwoPasses], Any],
    **options: Any,
) -> list[Any]:  # fmt: skip
    made, found, call = prepared(model, loss, ModelCall.of(model, (), batch()))
    programs = ProgramsOfThreads(made, SProgram.of(plan), num, results=found.names, **options)
    ranks = in_threads(
        lambda there: work(TwoPasses(programs, call, there, whole_loss=found)), range(num)
    )
    return [*ranks.values()]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", [clip, siglip, supcon])
def test_steps_and_losses_are_those_of_the_whole_batch(
    loss: Callable[..., Tensor], plan: str
) -> None:
    """Also for a last smaller batch, whose programs are others."""
    alone, batches, wanted = towers(), [batch(), batch(8, 2), batch(5, 3)], []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for given in batches:
        wanted.append(loss(alone(**given)))
        wanted[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    last = loss(alone(**batches[0])).detach()

    def work(parallel: TwoPasses) -> None:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for given, want in zip(batches, wanted, strict=True):
            found = parallel.step(**given)
            torch.testing.assert_close(found, want.detach(), rtol=1e-10, atol=0)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(parallel.evaluate(**batches[0]), last, rtol=1e-10, atol=0)
        state = parallel.state_dict()
        assert {*state} == {*alone.state_dict()}
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)

    on_ranks(towers(), loss, plan, PLANS[plan], work)


@pytest.mark.parametrize("plan", ["accumulate:microbatches=4", "one_f_one_b:microbatches=2"])
def test_both_passes_drop_the_same(plan: str) -> None:
    seen: list[dict[str, Tensor]] = []

    def loss(found: dict[str, Tensor]) -> Tensor:
        seen.append({name: value.detach() for name, value in found.items()})
        return clip(found)

    def work(parallel: TwoPasses) -> None:
        for _ in range(2):
            parallel.step(**batch())
            now = {name: parallel.results[f"feature {i}"] for i, name in enumerate(seen[-1])}
            assert all(torch.equal(now[name], value) for name, value in seen[-1].items())

    names = tuple(f"feature {number}" for number in range(4))
    on_ranks(towers(rate=0.5), loss, plan, 2, work, step_results=names)
    assert not torch.equal(seen[-1]["x"], seen[0]["x"])


def test_buffers_change_once_in_a_step() -> None:
    alone = towers(norm=True)
    clip(alone(**batch())).backward()

    def work(parallel: TwoPasses) -> None:
        parallel.step(**batch())
        found = parallel.state_dict()
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            torch.testing.assert_close(found[name], alone.state_dict()[name])

    on_ranks(towers(norm=True), clip, "data_parallel", 1, work)


def test_what_is_not_possible_is_refused() -> None:
    example = batch()
    with pytest.raises(ss.PlanError, match="whole_loss takes whole batches, and keeps no other"):
        ss.parallelize(towers(), kwargs=example, whole_loss=clip, results=("x",))

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.argmax(), 3

    with pytest.raises(ss.PlanError, match=r"has \['int'\]"):
        ss.parallelize(Odd(), kwargs={"x": example["x"]}, whole_loss=clip)


def test_parallelize_takes_a_whole_loss() -> None:
    model, example = towers(), batch()
    want = clip(deepcopy(model)(**example)).detach()
    parallel = ss.parallelize(
        model, kwargs=example, whole_loss=clip, plan="accumulate:microbatches=2"
    )
    torch.testing.assert_close(parallel.step(**example), want, rtol=1e-10, atol=0)
    assert {name for name, _ in parallel.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }
