"""``whole_loss``: losses that mix samples are those of the whole batch under plans that cut it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
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
    made, found, call, said = prepared(model, loss, ModelCall.of(model, (), batch()), ss.Batch())
    options = {"results": found.names, "batch": said, **options}
    programs = ProgramsOfThreads(made, SProgram.of(plan), num, **options)
    ranks = in_threads(
        lambda there: work(TwoPasses(programs, call, there, whole_loss=found)), range(num)
    )
    return [*ranks.values()]


@pytest.mark.many(6)
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

    # Ranks that are threads share torch's generator.
    given = batch()

    def work(parallel: TwoPasses) -> None:
        for _ in range(2):
            parallel.step(**given)
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


class Features(nn.Module):
    """Returns what ``of`` makes of a linear layer's results; ``scale`` is read in every forward."""

    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.of, self.scale = nn.Linear(WIDTH, WIDTH), of, 1.0
        self.anchors = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.of(self, self.scale * self.layer(x))


def spread(found: Any) -> Tensor:
    """A loss of all features together."""
    parts = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in found]
    return sum(((part @ part.mH).abs().logsumexp(-1).mean() for part in parts), torch.zeros(()))


FORMS: dict[str, Callable[..., Any]] = {
    "complex beside real": lambda model, z: (torch.fft.fft(z), z),
    "complex alone": lambda model, z: (torch.fft.fft(z),),
    "a parameter as long as the batch": lambda model, z: (z, model.anchors),
    "samples behind tokens": lambda model, z: (z.view(-1, 2, WIDTH // 2).transpose(0, 1),),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", ["accumulate:microbatches=2", "zero3"])
def test_features_may_have_any_form(form: str, plan: str) -> None:
    torch.manual_seed(0)
    alone = Features(FORMS[form]).double()
    model = deepcopy(alone)
    batches = [{"x": batch(size)["x"]} for size in (8, 8, 4)]
    wanted = []
    for given in batches:
        wanted.append(spread(alone(**given)))
        wanted[-1].backward()

    def work(parallel: TwoPasses) -> None:
        for given, want in zip(batches, wanted, strict=True):
            found = parallel.step(**given)
            torch.testing.assert_close(found, want.detach(), rtol=1e-10, atol=0)
        grads = dict(alone.named_parameters())
        for name, parameter in parallel.named_parameters():
            want = grads[name].grad
            if parameter.shape == grads[name].shape and want is not None:
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, want, rtol=1e-9, atol=1e-12)

    call = ModelCall.of(model, (), batches[0])
    made, found, call, said = prepared(model, spread, call, ss.Batch())
    options = {"results": found.names, "batch": said}
    programs = ProgramsOfThreads(made, SProgram.of(plan), 1, **options)
    in_threads(lambda t: work(TwoPasses(programs, call, t, whole_loss=found)), range(1))


def test_changes_of_the_model_count_as_without_a_whole_loss() -> None:
    torch.manual_seed(0)
    model = Features(lambda model, z: (F.dropout(z, 0.5, model.training),)).double()
    x = batch()["x"]
    parallel = ss.parallelize(model, (x,), whole_loss=spread)
    model.eval()
    torch.testing.assert_close(parallel.step(x), spread(model(x)).detach())
    model.scale = 3.0
    torch.testing.assert_close(parallel.step(x), spread(model(x)).detach())


def test_random_numbers_of_a_loss_are_those_of_the_step() -> None:
    def loss(found: Any) -> Tensor:
        return spread([F.dropout(part, 0.5) for part in found])

    torch.manual_seed(0)
    model, x = Features(lambda model, z: (z,)).double(), batch()["x"]
    runs = []
    for other in (1, 2):
        parallel = ss.parallelize(deepcopy(model), (x,), whole_loss=loss)
        torch.manual_seed(other)
        runs.append([parallel.step(x), parallel.step(x)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


# torch.compile imports torch.jit.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_models_are_taken_and_other_changes_of_the_call_are_refused() -> None:
    torch.manual_seed(0)
    model, x = Features(lambda model, z: (z,)).double(), batch()["x"]
    want = spread(model(x)).detach()
    parallel = ss.parallelize(torch.compile(deepcopy(model)), (x,), whole_loss=spread)
    torch.testing.assert_close(parallel.step(x), want)

    hooked, patched = deepcopy(model), deepcopy(model)
    hooked.register_forward_hook(lambda module, given, found: found)
    patched.forward = partial(Features.forward, patched)  # type: ignore[method-assign]
    for changed, what in ((hooked, "forward hooks"), (patched, "another forward")):
        with pytest.raises(ss.PlanError, match=f"whole_loss: {what} was set on the model"):
            ss.parallelize(changed, (x,), whole_loss=spread)


def test_what_is_not_possible_is_refused() -> None:
    example = batch()
    with pytest.raises(ss.PlanError, match="whole_loss takes whole batches, and keeps no other"):
        ss.parallelize(towers(), kwargs=example, whole_loss=clip, results=("x",))

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.argmax(), 3

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, found: Any) -> Tensor:
            return self.temperature * spread(found)

    model = Features(lambda model, z: (z.flatten(),)).double()
    with pytest.raises(ss.PlanError, match="whole_loss has parameters that are trained, and only"):
        ss.parallelize(model, (example["x"],), whole_loss=Learned())
    with pytest.raises(ss.PlanError, match=r"feature 0 .* for 8 samples: return it with a dim"):
        ss.parallelize(model, (example["x"],), whole_loss=spread)
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
