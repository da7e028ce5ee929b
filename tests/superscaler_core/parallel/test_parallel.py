"""``Parallel``: every call gives the results of one device, for any shape of the batch."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core import plans
from superscaler_core.parallel import Evaluated, Programs, SProgram
from superscaler_core.parallel import programs as programs_module
from superscaler_core.schedules import one_f_one_b
from tests.superscaler_core.parallel.threads import on_threads
from tests.superscaler_core.run.test_results import WORDS, batch, words

CLOSE = {"rtol": 0.0, "atol": 1e-12}


def named(size: int, seed: int = 0, length: int = 6) -> dict[str, Tensor]:
    tokens, labels = batch(size, seed, length)
    return {"tokens": tokens, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: gradients that are zero up to rounding do not decide the comparison.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def megatron_in_halves(plan: ss.Plan) -> None:
    plans.PLANS["megatron"](plan)
    plan.overlap = ss.Overlap(duplex=True)


PLANS: dict[str, tuple[str | Callable[..., None], dict[str, Any]]] = {
    "data": ("data_parallel", {}),
    "tensor": ("megatron", {}),
    "zero1": ("zero1", {}),
    "zero3": ("zero3", {}),
    "accumulate": ("accumulate", {"microbatches": 2}),
    "pipeline": ("one_f_one_b", {"microbatches": 4}),
    "routes": ("chimera", {"microbatches": 4}),
    "hybrid": ("hybrid:tp=2", {"microbatches": 2}),
    "host": ("zero3_offload", {}),
    "halves": (megatron_in_halves, {}),
    "specs": ("gspmd:specs=tokens:d0@x", {}),
}

SHAPES = [(8, 6), (3, 6), (8, 5), (1, 6), (3, 6)]
"""Sizes and lengths of batches, the first as in the example."""


@pytest.mark.parametrize("case, num_ranks", [*zip(PLANS, cycle([2, 4]))])
def test_batches_of_any_shape_train_as_on_one_device(case: str, num_ranks: int) -> None:
    check_shapes(*PLANS[case], num_ranks)


@pytest.mark.many(3)
@pytest.mark.parametrize("case", ["data", "tensor", "zero3", "pipeline", "hybrid"])
def test_decisions_of_a_file_train_on_batches_of_any_shape(case: str, tmp_path: Path) -> None:
    programs = Programs(words(), SProgram.of(*PLANS[case]), 4)
    file = tmp_path / "found.plan"
    programs.first(programs.call((), named(*SHAPES[0]))).plan.decisions.save(file)
    check_shapes(str(file), {}, 4)


def check_shapes(plan: str | Callable[..., None], options: dict[str, Any], num_ranks: int) -> None:
    """Steps on batches of all shapes, and an evaluation, give what they give on one device."""

    def work(parallel: ss.Parallel) -> tuple[Tensor, dict[str, Tensor], Any]:
        optimizer = adamw(parallel.parameters())
        losses = []
        for step, (size, length) in enumerate(SHAPES):
            losses.append(parallel.step(**named(size, step, length)))
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses), parallel.state_dict(), parallel.evaluate(**named(3, 9))

    found = on_threads(
        words(), named(*SHAPES[0]), num_ranks, work, plan=plan, options=options, results=("logits",)
    )
    model = words()
    optimizer = adamw(model.parameters())
    losses = []
    for step, (size, length) in enumerate(SHAPES):
        loss = model(**named(size, step, length))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        wanted = model(**named(3, 9))
    for mine, state, evaluated in found.values():
        torch.testing.assert_close(mine, torch.stack(losses), **CLOSE)
        torch.testing.assert_close(state, dict(model.state_dict()), **CLOSE)
        assert isinstance(evaluated, Evaluated)
        torch.testing.assert_close(evaluated.loss, wanted["loss"], **CLOSE)
        torch.testing.assert_close(dict(evaluated.results), {"logits": wanted["logits"]}, **CLOSE)


def test_batch_too_small_for_all_devices_uses_fewer_devices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs = Programs(words(), SProgram.of("data_parallel"), 4)
    programs.first(programs.call((), named(4)))
    with caplog.at_level(logging.INFO, "superscaler_core"):
        made = programs.of(programs.call((), named(3)), frozenset(programs.parameters)).compiled
    used = {d for op in made.plan.graph.ops for d in made.plan.op_split(op).devices}
    assert used == {0, 1, 2}
    assert "uses devices [0, 1, 2] alone" in caplog.text
    assert (
        programs.of(programs.call((), named(3, 7)), frozenset(programs.parameters)).compiled is made
    )


def test_plan_function_that_fails_on_fewer_devices_leaves_the_batch_to_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def two(plan: ss.Plan) -> None:
        head = plan.graph.ops_in("head")[0]
        for op in plan.graph.ops:
            plan.op_assign(op, plan.devices[op.index >= head.index])
        plan.pipeline([head])
        plan.op_order(one_f_one_b(2, 2))

    programs = Programs(words(), SProgram.of(two), 2)
    programs.first(programs.call((), named(4)))
    made = programs.of(programs.call((), named(3)), frozenset(programs.parameters)).compiled
    assert {d for op in made.plan.graph.ops for d in made.plan.op_split(op).devices} == {0}
    assert "uses devices [0] alone" in caplog.text


def test_number_of_kept_programs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "MAX_PROGRAMS", 3)
    programs = Programs(words(), SProgram.of("data_parallel"), 2)
    first = programs.first(programs.call((), named(2)))
    made = [
        programs.of(programs.call((), named(2, 0, 6 + i)), frozenset(programs.parameters)).compiled
        for i in range(5)
    ]
    assert made[0] is first
    assert programs.kept == {first, *made[-3:]}


class Noisy(nn.Module):
    """Dropout between two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(x))).square().mean()


def noisy() -> nn.Module:
    torch.manual_seed(1)
    return Noisy().double()


def test_evaluation_has_no_dropout_and_does_not_affect_training() -> None:
    model, x = noisy(), torch.randn(4, 5, dtype=torch.float64)

    def train(parallel: ss.Parallel, *, evaluates: bool) -> tuple[list[float], list[float]]:
        losses, evaluated = [], []
        for _ in range(3):
            losses.append(parallel.step(x=x).item())
            if evaluates:
                loss = parallel.evaluate(x=x)
                assert isinstance(loss, Tensor)
                evaluated.append(loss.item())
        return losses, evaluated

    found = [
        on_threads(model, {"x": x}, 2, lambda p, e=e: train(p, evaluates=e))[0]  # type: ignore[misc]
        for e in (False, True)
    ]
    assert all(module.training for module in model.modules())
    assert found[0][0] == found[1][0]
    assert len(set(found[0][0])) == 3
    assert found[1][1] == pytest.approx([noisy().eval()(x).item()] * 3, rel=1e-12)


class Normed(nn.Module):
    """Two maps around a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).square().mean()


def test_evaluation_uses_the_running_statistics_of_the_state() -> None:
    batches = [torch.randn(size, 4, dtype=torch.float64) for size in (8, 8, 6, 8)]

    def work(parallel: ss.Parallel) -> tuple[Any, dict[str, Tensor]]:
        for x in batches:
            parallel.step(x=x)
        return parallel.evaluate(x=batches[2]), parallel.state_dict()

    for loss, state in on_threads(Normed().double(), {"x": batches[0]}, 2, work).values():
        model = Normed().double().eval()
        model.load_state_dict(state)
        assert loss.item() == pytest.approx(model(batches[2]).item(), rel=1e-12)
        assert state["norm.num_batches_tracked"] == len(batches)


def test_state_dict_and_checkpoint_have_the_buffers_of_the_last_program(tmp_path: Path) -> None:
    batches = [torch.randn(size, 4, dtype=torch.float64) for size in (6, 6, 2)]

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        for x in batches:
            parallel.step(x=x)
        parallel.save(tmp_path / "saved")
        return parallel.state_dict()

    def elsewhere(plan: ss.Plan) -> None:
        for op in plan.graph.ops:
            plan.op_assign(op, plan.devices[plan.graph.inputs[0].shape[0] == 2])

    found = on_threads(Normed().double(), {"x": batches[0]}, 2, work, plan=elsewhere)
    saved = Normed().double()
    ss.load_run(tmp_path / "saved", saved)
    assert saved.norm.num_batches_tracked == len(batches)
    for state in found.values():
        torch.testing.assert_close(state, dict(saved.state_dict()), rtol=0, atol=0)


class Standardised(nn.Module):
    """Training changes two buffers; only evaluation reads them, and computes with them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)
        self.register_buffer("square", torch.ones(4))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.square.mul_(0.5).add_(x.square().mean(0), alpha=0.5)
                self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        else:
            x = (x - self.mean) / self.square.sqrt() * self.scale.exp()
        return self.line(x).square().mean()


def test_evaluation_reads_the_present_values_of_buffers() -> None:
    batches = [torch.randn(size, 4, dtype=torch.float64) for size in (8, 6, 8)]
    model, alone = Standardised().double(), Standardised().double()
    alone.scale.fill_(2.0)
    state = copy.deepcopy(alone.state_dict())

    def work(parallel: ss.Parallel) -> list[float]:
        parallel.load_state_dict(state)
        return [f(x=x).item() for x in batches for f in (parallel.step, parallel.evaluate)]

    expected = [alone.train(mode)(x).item() for x in batches for mode in (True, False)]
    for losses in on_threads(model, {"x": batches[0]}, 2, work).values():
        assert losses == pytest.approx(expected, rel=1e-12)


def test_dropout_masks_continue_across_batch_shapes() -> None:
    x = torch.randn(4, 5, dtype=torch.float64)

    def losses(parallel: ss.Parallel, sizes: list[int]) -> list[float]:
        return [parallel.step(x=x[:size]).item() for size in sizes]

    alike, mixed = (
        on_threads(noisy(), {"x": x}, 2, lambda p, s=sizes: losses(p, s))[0]  # type: ignore[misc]
        for sizes in ([4, 4, 4], [4, 2, 4])
    )
    assert (alike[0], alike[2]) == (mixed[0], mixed[2])
    assert alike[1] != mixed[1]


def test_programs_of_all_shapes_use_the_autocast_of_their_creation() -> None:
    def work(parallel: ss.Parallel) -> tuple[list[float], set[str]]:
        losses = [parallel.step(**named(size)).item() for size in (4, 3)]
        graphs = [made.plan.graph for made in parallel._programs.kept]
        return losses, {op.outputs[0].dtype for g in graphs for op in g.ops if op.kind == "linear"}

    model = words().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = on_threads(model, named(4), 2, work)
        expected = [model(**named(size))["loss"].item() for size in (4, 3)]
    for losses, dtypes in found.values():
        assert dtypes == {"bfloat16"}
        assert losses == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    "plan", ["accumulate", "interleaved:pp=1,chunks=2", "zero_bubble_v:pp=1", "swap"]
)
def test_step_does_not_depend_on_a_failed_step_before_it(plan: str) -> None:
    model = words()
    model.layers[0].insert(1, nn.BatchNorm1d(6).double())
    options = {} if plan == "swap" else {"microbatches": 4}
    failed, fresh = (
        ss.parallelize(model, kwargs=named(8), plan=plan, options=options) for _ in range(2)
    )
    bad = named(8, 1)
    bad["labels"][-1, 0] = WORDS
    with pytest.raises(IndexError):
        failed.step(**bad)
    for parameter in failed.parameters():
        parameter.grad = None
    fresh.load_state_dict(failed.state_dict())
    assert failed.step(**named(8)).item() == fresh.step(**named(8)).item()
    grads = ({n: p.grad for n, p in each.named_parameters()} for each in (failed, fresh))
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    torch.testing.assert_close(failed.state_dict(), fresh.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["data_parallel", "zero3"])
def test_programs_made_in_inference_mode_run_outside_of_it(plan: str) -> None:
    def work(parallel: ss.Parallel) -> list[float]:
        with torch.inference_mode():
            losses = [parallel.evaluate(**named(2)).loss.item()]
        losses.append(parallel.step(**named(4)).item())
        return [*losses, parallel.evaluate(**named(2)).loss.item()]

    wanted = [words()(**named(size))["loss"].item() for size in (2, 4, 2)]
    for losses in on_threads(words(), named(4), 2, work, plan=plan, results=("best",)).values():
        assert losses == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_without_gradients_raises_as_backward_does_on_every_rank(mode: Any) -> None:
    def work(parallel: ss.Parallel) -> tuple[float, float]:
        of_rank = mode if parallel.trainer.rank == 0 else torch.enable_grad
        with pytest.raises(RuntimeError, match="does not require grad"), mode():
            parallel.step(**named(4))
        # Ranks that compute gradients learn of a rank that does not.
        with pytest.raises(RuntimeError, match="does not require grad"), of_rank():
            parallel.step(**named(4))
        with mode():
            evaluated = parallel.evaluate(**named(4))
        return parallel.step(**named(4)).item(), evaluated.item()

    wanted = words()(**named(4))["loss"].item()
    for found in on_threads(words(), named(4), 2, work).values():
        assert found == pytest.approx((wanted, wanted), rel=1e-12)


def test_step_reads_parameters_whose_data_was_replaced() -> None:
    parallel, model = ss.parallelize(words(), kwargs=named(4)), words()
    parallel.step(**named(4))
    for each in (parallel, model):
        halves = nn.utils.parameters_to_vector(each.parameters()) / 2
        nn.utils.vector_to_parameters(halves, each.parameters())
    wanted = model(**named(4))["loss"].item()
    assert parallel.step(**named(4)).item() == pytest.approx(wanted, rel=1e-12)


def test_input_of_a_trainer_that_requires_a_gradient_raises_value_error() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    parallel = ss.parallelize(Partly(), kwargs={"x": x.detach()})
    with pytest.raises(ValueError, match=r"input 'x' requires a gradient.*detach it"):
        parallel.trainer.step(x=x)
    assert parallel.evaluate(x=x).item() == parallel.step(x=x.detach()).item()


class Partly(nn.Module):
    """The loss depends on four maps, and has a gradient with respect to two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.no_grad, self.cut, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            y = self.no_grad(x)
        return (self.last(x) + y + self.cut(x).detach()).square().mean()


@pytest.mark.parametrize("plan", ["data_parallel", "zero3", "one_f_one_b:pp=1,microbatches=2"])
def test_parameters_have_a_gradient_where_they_have_one_in_torch(plan: str) -> None:
    x = torch.randn(4, 4)

    def work(parallel: ss.Parallel) -> set[str]:
        parallel.step(x=x)
        return {name for name, p in parallel.named_parameters() if p.grad is not None}

    wanted = {"first.weight", "first.bias", "last.weight", "last.bias"}
    found = on_threads(Partly(), {"x": x}, 2, work, plan=plan)
    assert set().union(*found.values()) == wanted


class Counting(nn.Module):
    """A loss, and two scalars beside it that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        above = x[:, 0] > 0
        return {"loss": self.line(x).square().mean(), "count": above.sum(), "all": above.all()}


@pytest.mark.parametrize("plan", ["data_parallel", "accumulate:microbatches=2"])
def test_integer_and_bool_scalars_are_those_of_the_whole_batch(plan: str) -> None:
    x = torch.tensor([1.0, 1, 1, -1])[:, None].expand(4, 4)
    parallel = ss.parallelize(
        Counting(), kwargs={"x": x}, plan=plan, results=("count", "all"), step_results=("count",)
    )
    results = parallel.evaluate(x=x).results
    assert dict(results) == {"count": torch.tensor(3), "all": torch.tensor(False)}
    parallel.step(x=x)
    assert parallel.results["count"] == 3


class Steps(nn.Module):
    """A recurrence over rows of time and samples, in different orders, and sums over both."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        states = self.line(x.transpose(0, 1)).tanh()  # [time, samples, features]
        return {"loss": states.square().mean(), "states": states, "sums": states.sum((0, 1))}


@pytest.mark.parametrize("plan, microbatches", [("data_parallel", 1), ("accumulate", 2)])
def test_results_are_joined_along_the_dim_of_the_samples(plan: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model, x = Steps(), torch.randn(4, 3, 6, dtype=torch.float64)

    def work(parallel: ss.Parallel) -> Mapping[str, Tensor]:
        return parallel.evaluate(x=x).results

    options = {"microbatches": microbatches} if plan == "accumulate" else {}
    found = on_threads(model, {"x": x}, 1, work, plan=plan, options=options, results=("states",))
    torch.testing.assert_close(found[0]["states"], model(x)["states"], rtol=1e-12, atol=0)


def test_result_without_samples_is_evaluated_in_a_single_microbatch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = Steps(), torch.randn(4, 3, 6, dtype=torch.float64)
    plan = "accumulate:microbatches=2"
    parallel = ss.parallelize(model, kwargs={"x": x}, plan=plan, results=("sums",))
    torch.testing.assert_close(parallel.evaluate(x=x).results["sums"], model(x)["sums"])
    assert re.search(
        r"2 microbatches, which do not make the result 'sums' of the whole batch", caplog.text
    )


class Tied(nn.Module):
    """Words that a look-up cuts by width, and the last layer reads whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
            for _ in range(4)
        )
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("plan, num", [("interlaced:microbatches=2", 2), ("interlaced:tp=2", 4)])
def test_tied_words_that_ranks_store_some_of_train_on_batches_of_any_size(
    plan: str, num: int
) -> None:
    torch.manual_seed(0)
    model, batches = Tied().double(), [torch.randint(16, (size, 4)) for size in (8, 6, 3, 8)]
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for tokens in batches:
        alone(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        mine = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for tokens in batches:
            parallel.step(tokens=tokens)
            mine.step()
            mine.zero_grad()
        return parallel.state_dict()

    for state in on_threads(model, {"tokens": batches[0]}, num, work, plan=plan).values():
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_inactive_programs_hold_no_copies_of_weights() -> None:
    def work(parallel: ss.Parallel) -> tuple[int, int]:
        own = parallel.trainer._rank.weights
        sizes = []
        for size in (4, 2):
            parallel.step(**named(size))
            copies = (own.copy(name) for name in own._own)
            sizes.append(sum(copy.untyped_storage().size() for copy in copies))
        return sizes[0], sizes[1]

    for running, resting in on_threads(words(), named(4), 2, work, plan="zero1").values():
        assert running > 0
        assert resting == 0


def test_meta_model_has_to_load_values_before_it_trains() -> None:
    with torch.device("meta"):
        model = words()
    # The model is made outside of the threads, because threads share one random generator.
    alone = words()
    wanted = alone(**named(4))["loss"].item()

    def work(parallel: ss.Parallel) -> float:
        with pytest.raises(ss.PlanError, match="no values yet"):
            parallel.step(**named(4))
        parallel.load_state_dict(alone.state_dict())
        return parallel.step(**named(4)).item()

    for loss in on_threads(model, named(4), 2, work).values():
        assert loss == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "plan, options, message",
    [
        ("megatrom", {}, "there is no plan 'megatrom'; .* Is it megatron"),
        ("hybrid", {"dp": 2}, "hybrid takes no dp; it takes tp, pp, microbatches"),
        ("data_parallel", {"tp": 2}, "data_parallel takes no tp; it takes nothing"),
        ("there/is/no.plan", {}, "plan='there/is/no.plan': No such file"),
    ],
)
def test_unknown_plans_and_options_raise_plan_error(
    plan: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ss.PlanError, match=message):
        SProgram.of(plan, options)


def test_example_batch_not_divisible_by_microbatches_raises_plan_error() -> None:
    programs = Programs(words(), SProgram.of("accumulate", {"microbatches": 4}), 2)
    with pytest.raises(ss.PlanError, match=r"4 microbatches, .* \[6, 6\].* a multiple of 4"):
        programs.first(programs.call((), named(6)))


def test_asynchronous_plan_raises_plan_error() -> None:
    programs = Programs(words(), SProgram.of("pipedream", {"microbatches": 4}), 2)
    with pytest.raises(ss.PlanError, match=r"pipedream updates .* see Trainer.update_with"):
        programs.first(programs.call((), named(8)))


def test_parallelize_without_torchrun_uses_one_process() -> None:
    parallel = ss.parallelize(words(), kwargs=named(4), results=("best",))
    assert parallel.step(**named(4)).item() == words()(**named(4))["loss"].item()
    evaluated = parallel.evaluate(**named(2))
    assert isinstance(evaluated, Evaluated)
    assert torch.equal(evaluated.results["best"], words()(**named(2))["best"])
    assert "Words" in parallel.compiled.summary()
