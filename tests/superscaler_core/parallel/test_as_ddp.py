"""What users of DDP and FSDP2 write around a step: accumulation, results, adapters, compiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import superscaler_core as ss
from superscaler_core.parallel.automatic import pasted
from superscaler_core.parallel.parallel import Evaluated
from superscaler_core.plan import Keep
from superscaler_core.training import StorageMeter
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


def grads_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("plan", ["zero1", "one_f_one_b:microbatches=2"])
def test_scaled_steps_add_up_to_the_mean_of_their_losses(plan: str) -> None:
    parts = [batch(8)[:4], batch(8)[4:]]
    alone, losses = net(), []
    for part in parts:
        losses.append(alone(x=part).detach())
        (alone(x=part) / 2).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        for part, want in zip(parts, losses, strict=True):
            with parallel.scaled(1 / 2):
                loss = parallel.step(x=part)
            torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        torch.optim.SGD(parallel.parameters(), lr=0.1).step()
        with (
            parallel.scaled(1.0 + parallel.trainer.rank),
            pytest.raises(ss.PlanError, match=r"ranks disagree about the factor of scaled\(...\)"),
        ):
            parallel.step(x=parts[0])
        return parallel.state_dict()

    for found in on_threads(net(), {"x": parts[0]}, 2, work, plan=plan).values():
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


class Scored(nn.Module):
    """Returns its scores beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean(), "scores": x, "mean": x.mean()}


def scored() -> Any:
    torch.manual_seed(0)
    return Scored().double()


@pytest.mark.parametrize("kind", ["whole", "local"])
@pytest.mark.parametrize("plan", ["zero3", "accumulate:microbatches=2"])
def test_a_step_leaves_its_results(plan: str, kind: str) -> None:
    want = scored()(batch(8))

    def work(parallel: ss.Parallel) -> None:
        rank = parallel.trainer.rank
        x = batch(8) if kind == "whole" else batch(8)[4 * rank : 4 * rank + 4]
        parallel.step(x=x)
        torch.testing.assert_close(parallel.results["scores"], want["scores"].detach())
        torch.testing.assert_close(parallel.results["mean"], want["mean"].detach())
        parallel.evaluate(x=x)

    example = {"x": batch(8 if kind == "whole" else 4)}
    on_threads(scored(), example, 2, work, plan=plan, batch=ss.Batch(kind=kind),
               step_results=("scores", "mean"))  # fmt: skip


class Measured(nn.Module):
    """Results that microbatches give, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.layer(x)
        a = z.argmax(-1)
        return {
            "loss": F.cross_entropy(z, y), "scores": z, "classes": a, "mean": z.mean(),
            "correct": (a == y).sum(), "total": F.cross_entropy(z, y, reduction="sum"),
            "best": z.max(), "order": z.sort(0).values, "spread": z.std(), "pairs": z @ z.T,
            "confusion": F.one_hot(y, 6).T @ F.one_hot(a, 6), "columns": z.sum(0),
            "rolled": z.roll(1, 0),
        }  # fmt: skip


GIVEN = ("scores", "classes", "mean", "correct", "total")
MIXING = ("best", "order", "spread", "pairs", "confusion", "columns", "rolled")


def test_results_are_those_of_the_whole_batch_or_refused() -> None:
    torch.manual_seed(0)
    model, y = Measured().double(), torch.randint(6, (8,))
    given = {"x": batch(8), "y": y}
    want = {name: value.detach() for name, value in deepcopy(model)(**given).items()}

    def check(found: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
        for name in names:
            torch.testing.assert_close(
                found[name], want[name], rtol=1e-12, atol=0, check_dtype=name != "correct"
            )

    parallel = ss.parallelize(
        deepcopy(model), kwargs=given, plan="accumulate:microbatches=2", step_results=GIVEN,
        results=(*GIVEN, *MIXING),
    )  # fmt: skip
    parallel.step(**given)
    check(parallel.results, GIVEN)
    # An evaluation needs no microbatches.
    found = parallel.evaluate(**given)
    assert isinstance(found, Evaluated)
    check(found.results, (*GIVEN, *MIXING))
    for name in MIXING:
        with pytest.raises(ss.PlanError, match=f"do not make the result '{name}' of the whole"):
            ss.parallelize(model, kwargs=given, plan="accumulate", step_results=(name,))


@pytest.mark.parametrize(
    ("habit", "error", "words"),
    [
        (lambda model: model.train(), AttributeError, r"call model\.train\(\) there"),
        (lambda model: model.zero_grad(), AttributeError, "of the optimizer"),
        (lambda model: model.no_sync(), AttributeError, r"inside scaled\(1 / n\)"),
        (lambda model: model.module, AttributeError, "keeps its first values"),
        (lambda model: model.nothing, AttributeError, r"has no attribute 'nothing'\.$"),
        (lambda model: model.results["logits"], KeyError, r"the steps keep none; name it in step_"),
    ],
)
def test_habits_of_torch_are_told_what_there_is_instead(
    habit: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    parallel = ss.parallelize(net(), kwargs={"x": batch(8)})
    with pytest.raises(error, match=words):
        habit(parallel)


def test_state_of_the_first_rank_alone_and_of_what_is_trained() -> None:
    model = net()
    model.layers[0].requires_grad_(False)
    want = model.state_dict()

    def work(parallel: ss.Parallel) -> None:
        rank = parallel.trainer.rank
        found = parallel.state_dict(rank0_only=True)
        assert {*found} == ({*want} if rank == 0 else set())
        assert all(torch.equal(found[name], want[name]) for name in found)
        adapters = parallel.state_dict(trained_only=True)
        assert {*adapters} == {n for n in want if n.startswith("layers.") and n[7] != "0"}
        parallel.step(x=batch())
        torch.optim.SGD(parallel.parameters(), lr=0.1).step()
        # What was given is not changed by what follows.
        assert all(torch.equal(adapters[name], want[name]) for name in adapters)

    on_threads(model, {"x": batch()}, 2, work, plan="zero3")
    on_threads(model, {"x": batch()}, 2, work)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("how", ["all", "a layer"])
def test_compiled_modules_have_their_plain_names(how: str) -> None:
    model = net()
    if how == "all":
        model = torch.compile(model)
    else:
        model.layers[1] = torch.compile(model.layers[1])

    # Ranks are threads here, which share the generator that makes values.
    want, other = net()(x=batch()).detach(), net(seed=4).state_dict()

    def work(parallel: ss.Parallel) -> None:
        torch.testing.assert_close(parallel.step(x=batch()), want, rtol=1e-12, atol=0)
        assert {*parallel.state_dict()} == {*other}
        parallel.load_state_dict(other)

    on_threads(model, {"x": batch()}, 2, work, plan="zero3")


class Checkpointed(nn.Module):
    """Layers in ``torch.utils.checkpoint``, as ``gradient_checkpointing_enable()`` puts them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        wide = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
        self.layers, self.reentrant = nn.ModuleList(wide), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", ["data_parallel", "hybrid:pp=2,microbatches=2"])
def test_what_the_model_checkpoints_is_recomputed(reentrant: bool, plan: str) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant), torch.randn(64, 16)
    model(x).backward()
    want = grads_of(model)

    def run(plan: str) -> int:
        def work(parallel: ss.Parallel) -> int:
            parallel.step(x=x)
            for parameter in parallel.parameters():
                parameter.grad = None
            with ss.LiveBytes(parallel) as live:
                parallel.step(x=x)
            for name, grad in grads_of(parallel).items():
                torch.testing.assert_close(grad, want[name])
            return live.peak_bytes

        return max(on_threads(model, {"x": x}, 2, work, plan=plan).values())

    joint = "," if ":" in plan else ":"
    asked = run(plan)
    assert asked < run(f"{plan}{joint}keep=everything")
    regions = [[op.checkpoint for op in ss.capture(model, (x,)).ops if op.checkpoint == n]
               for n in range(1, 5)]  # fmt: skip
    assert all(len(region) >= 3 for region in regions)


def test_memory_of_checkpointed_layers_is_that_of_torch() -> None:
    """Within a tenth, beside torch's own peak of the same step."""
    torch.manual_seed(0)
    model, x = Checkpointed(False), torch.randn(256, 16)

    def work(parallel: ss.Parallel) -> int:
        parallel.step(x=x)
        with ss.LiveBytes(parallel) as live:
            parallel.step(x=x)
        return live.peak_bytes

    (ours,) = on_threads(model, {"x": x}, 1, work).values()
    assert ours == pytest.approx(peak_of_torch(model, x), rel=0.1)


def peak_of_torch(model: nn.Module, x: Tensor) -> int:
    class Peak(StorageMeter):
        peak = 0

        def measure(self) -> None:
            self.peak = max(self.peak, self.now_bytes)

    model(x).backward()
    with Peak() as meter:
        meter.count([t for p in model.parameters() for t in (p, p.grad) if t is not None])
        model(x).backward()
    return meter.peak


def test_a_name_of_the_search_is_a_plan() -> None:
    from superscaler_core.front_end import ModelCall

    call = ModelCall.of(scored(), (batch(8),), None)
    found = pasted("hybrid dp=2 tp=1 pp=1 samples=2 zero=3 keep=block_inputs", call, 2,
                   torch.device("cpu"))  # fmt: skip
    assert found is not None
    assert found.num_microbatches == 2
    assert found.options["microbatches"] == 2
    plan = ss.Plan(ss.capture(scored(), (batch(4),)), range(2))
    found(plan, 2)
    assert plan.runs_again
    assert plan.fsdp_units
    assert pasted("hybrid:tp=2", call, 2, torch.device("cpu")) is None
    with pytest.raises(ss.PlanError, match="is of 4 devices and microbatches of 4 samples; here"):
        pasted("hybrid dp=4 tp=1 pp=1 samples=1", call, 2, torch.device("cpu"))
    assert Keep.BLOCK_INPUTS is found.function.setting.keep


def test_a_name_of_the_search_says_all_degrees_and_samples() -> None:
    with pytest.raises(ss.PlanError, match="a name of search says tp, pp, samples too"):
        ss.parallelize(net(), kwargs={"x": batch()}, plan="hybrid dp=1")


def test_options_beside_a_name_of_the_search_are_refused() -> None:
    plan = "hybrid dp=1 tp=1 pp=1 samples=8"
    with pytest.raises(ss.PlanError, match=r"which says all options: leave out zero, or give"):
        ss.parallelize(net(), kwargs={"x": batch()}, plan=plan, options={"zero": 3})


@pytest.mark.parametrize("plan", ["data_parallel", "one_f_one_b:microbatches=2", "zero3"])
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_last_smaller_batch_is_trained_by_as_many_devices_as_it_has_samples(
    plan: str, size: int
) -> None:
    alone = net()
    alone(x=batch(size)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        parallel.step(x=batch(size))
        torch.optim.SGD(parallel.parameters(), lr=0.1).step()
        last = next(c for c, rank in parallel._ranks.items() if rank is parallel._last)
        used = {d for op in last.plan.graph.ops for d in last.plan.op_split(op).devices}
        # A single sample has no dim to cut: all devices compute it.
        assert used == {*range(4 if plan.startswith("one_f") or size == 1 else min(size, 4))}
        return parallel.state_dict()

    for found in on_threads(net(), {"x": batch(8)}, 4, work, plan=plan).values():
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)
