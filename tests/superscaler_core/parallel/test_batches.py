"""What ranks pass: one whole batch, which they compare, or samples of their own, which make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.front_end import ModelCall
from superscaler_core.parallel.batch import Inputs
from superscaler_core.parallel.routes import Groups, Routes, groups_of
from superscaler_core.parallel.sprogram import SProgram
from tests.superscaler_core.parallel.test_parallel import CLOSE, named
from tests.superscaler_core.parallel.threads import on_threads
from tests.superscaler_core.run.test_results import words

LOCAL = ss.Batch(kind="local")


# --- one whole batch ----------------------------------------------------------------------------


def refusals(work: Callable[[ss.Parallel], Any], **options: Any) -> set[str]:
    """The messages of the errors of all ranks, of which all have one."""

    def tried(parallel: ss.Parallel) -> str:
        with pytest.raises(ValueError, match=r"other|differ|gradient") as error:
            work(parallel)
        return str(error.value)

    found = on_threads(words(), named(4), options.pop("num_ranks", 2), tried, **options)
    return {*found.values()}


def changed(batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A batch in which one label depends on the rank."""
    labels = batch["labels"].clone()
    labels[-1, -1] = rank
    return {**batch, "labels": labels}


def test_other_values_on_one_rank_are_refused_on_all_ranks_by_input() -> None:
    (found,) = refusals(lambda p: p.step(**changed(named(4), p.trainer.rank)), plan="megatron")
    assert "input 'labels' has other values on rank 1 than on rank 0" in found
    assert 'ss.Batch(kind="local")' in found


def test_other_shapes_on_one_rank_are_refused_on_all_ranks() -> None:
    (found,) = refusals(lambda p: p.step(**named(2 + p.trainer.rank)), plan="zero3")
    assert (
        "rank 0 passes tokens [2, 6], labels [2, 6] (int64), and rank 1 passes tokens [3" in found
    )


@pytest.mark.parametrize("known", [[], [2], [2, 3]])
def test_other_shapes_are_refused_however_many_ranks_know_theirs(known: list[int]) -> None:
    def work(parallel: ss.Parallel) -> None:
        for size in known:
            parallel.step(**named(size))
        parallel.step(**named(2 + parallel.trainer.rank))

    (found,) = refusals(work)
    assert "ranks pass other shapes" in found


@pytest.mark.parametrize(
    "check, is_refused",
    [("first", [False, False]), ("every", [False, True]), ("never", [False] * 2)],
)
def test_values_are_compared_as_often_as_asked(check: Any, is_refused: list[bool]) -> None:
    def work(parallel: ss.Parallel) -> list[bool]:
        found = []
        for batch in (named(4), changed(named(4), parallel.trainer.rank)):
            try:
                parallel.step(**batch)
            except ValueError:
                found.append(True)
            else:
                found.append(False)
        return found

    batch = ss.Batch(check=check)
    assert on_threads(words(), named(4), 2, work, batch=batch) == dict.fromkeys((0, 1), is_refused)


# --- samples of their own -----------------------------------------------------------------------

PAIRS: Groups = ((0, 1), (2, 3))
CASES: dict[str, tuple[str, Groups, tuple[int, ...]]] = {
    "uneven": ("data_parallel", ((0,), (1,)), (1, 3)),
    "zero3": ("zero3", ((0,), (1,)), (2, 2)),
    "tensor": ("megatron", ((0, 1),), (4,)),
    "both": ("hybrid:tp=2,pp=1,microbatches=2", PAIRS, (4, 4)),
    "pipelines": ("hybrid:tp=1,pp=2,microbatches=2", ((0, 2), (1, 3)), (4, 4)),
    "uneven pipelines": ("hybrid:tp=1,pp=2,microbatches=2", ((0, 2), (1, 3)), (2, 6)),
}


def parts(batch: Mapping[str, Tensor], groups: Groups, sizes: tuple[int, ...]) -> list[Any]:
    """The samples of every rank."""
    ends = pairwise((0, *accumulate(sizes)))
    found = {
        rank: {name: x[lo:hi] for name, x in batch.items()}
        for group, (lo, hi) in zip(groups, ends, strict=True)
        for rank in group
    }
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("case", CASES)
def test_samples_of_all_ranks_are_one_batch(case: str) -> None:
    plan, groups, sizes = CASES[case]
    batch = named(sum(sizes))
    batch["labels"][1:, 2:] = -100
    mine = parts(batch, groups, sizes)

    def work(parallel: ss.Parallel) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        own = mine[parallel.trainer.rank]
        loss, evaluated = parallel.step(**own), parallel.evaluate(**own)
        assert not isinstance(evaluated, Tensor)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter -= 0 if parameter.grad is None else parameter.grad
        return loss, evaluated.loss, evaluated.results["logits"], parallel.state_dict()

    example = {name: x[: max(sizes)] for name, x in batch.items()}
    found = on_threads(
        words(), example, len(mine), work, plan=plan, batch=LOCAL, results=("logits",)
    )
    model = words()
    wanted = model(**batch)
    wanted["loss"].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    for loss, evaluated, logits, state in found.values():
        torch.testing.assert_close(loss, wanted["loss"].detach(), **CLOSE)
        torch.testing.assert_close(evaluated, wanted["loss"].detach(), **CLOSE)
        torch.testing.assert_close(logits, wanted["logits"].detach(), **CLOSE)
        torch.testing.assert_close(state, dict(model.state_dict()), **CLOSE)


@pytest.mark.parametrize(
    "plan, num_ranks, groups",
    [
        ("data_parallel", 4, ((0,), (1,), (2,), (3,))),
        ("zero1", 2, ((0,), (1,))),
        ("megatron", 2, ((0, 1),)),
        ("one_f_one_b:microbatches=2", 2, ((0, 1),)),
        ("hybrid:tp=2,pp=1,microbatches=2", 4, PAIRS),
        ("hybrid:tp=1,pp=2,microbatches=2", 4, ((0, 2), (1, 3))),
    ],
)
def test_samples_stay_where_a_program_reads_those_of_its_rank(
    plan: str, num_ranks: int, groups: Groups
) -> None:
    made = ss.Plan(ss.capture(words(), kwargs=named(4)), range(num_ranks))
    sprogram = SProgram.of(plan)
    sprogram(made, sprogram.num_microbatches)
    assert groups_of(made) == groups
    sizes = [4 * made.num_microbatches // len(groups)] * len(groups)
    for rank in range(num_ranks):
        for route in Routes(made, groups, sizes, rank)._routes.values():
            assert route.dst is None or route.dst == route.src


def test_ranks_with_the_same_work_pass_the_same_samples() -> None:
    def work(parallel: ss.Parallel) -> None:
        parallel.step(**changed(named(4), parallel.trainer.rank))

    (found,) = refusals(work, plan="megatron", batch=LOCAL)
    assert "input 'labels' has other values on rank 1 than on rank 0" in found
    assert "This plan gives the same samples to ranks 0, 1." in found


def test_ranks_with_the_same_work_pass_as_many_samples() -> None:
    (found,) = refusals(lambda p: p.step(**named(2 + p.trainer.rank)), plan="megatron", batch=LOCAL)
    assert "rank 0 passes tokens [2, 6]" in found


@pytest.mark.parametrize(
    "odd, message",
    [
        (lambda x: {**x, "labels": x["labels"][:1]}, "inputs of rank 1 differ in their number"),
        (lambda x: {n: t[:, :4] for n, t in x.items()}, r"rank 1 passes tokens ['*', 4]"),
    ],
)
def test_odd_samples_of_one_rank_are_refused_on_all_ranks(odd: Any, message: str) -> None:
    def work(parallel: ss.Parallel) -> None:
        parallel.step(**(odd(named(2)) if parallel.trainer.rank else named(2)))

    (found,) = refusals(work, batch=LOCAL)
    assert message in found


# --- the dims of samples ------------------------------------------------------------------------


class Nested(nn.Module):
    """Inputs by position, by name and inside a dict."""

    def forward(self, x: Tensor, more: dict[str, Tensor], table: Tensor) -> Tensor:
        return x.sum() + more["y"].sum() + table.sum()


def inputs(batch: ss.Batch) -> Inputs:
    programs = ss.parallel.Programs(Nested(), SProgram.of("accumulate"), 1, batch=batch)
    x, y, table = torch.ones(5, 4), torch.ones(4, 3), torch.ones(4, 4)
    return programs.inputs(programs.call((x, {"y": y}), {"table": table}))


@pytest.mark.parametrize(
    "said, dims",
    [
        ({}, (0, 0, 0)),
        ({"x": 1}, (1, 0, 0)),
        ({"x": -1, "table": None}, (1, 0, None)),
        ({"more.y": 1}, (None, 1, None)),
        ({"more": None, "x": 0}, (0, None, None)),
    ],
)
def test_inputs_that_are_not_named_have_samples_if_sizes_agree(
    said: dict[str, int | None], dims: tuple[int | None, ...]
) -> None:
    found = inputs(ss.Batch(said))
    assert found.names == ("x", "more.y", "table")
    assert found.dims == dims


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"tabel": None}, "names 'tabel'.*Is it table"),
        ({"x": 2}, r"dim 2 of 'x' has the samples, and 'x' is \[5, 4\]"),
    ],
)
def test_names_and_dims_that_a_call_does_not_have_are_refused(
    batch: dict[str, int | None], message: str
) -> None:
    with pytest.raises(ss.PlanError, match=message):
        inputs(ss.Batch(batch))


@pytest.mark.parametrize(
    "value", [{"kind": "mine"}, {"check": "always"}, {"dims": {"x": "1"}}, {"dims": ["x"]}]
)
def test_batch_refuses_unknown_words(value: dict[str, Any]) -> None:
    with pytest.raises(ss.PlanError, match="Batch takes"):
        ss.Batch(**value)


class Twice(nn.Module):
    def forward(self, x: dict[Any, Tensor]) -> Tensor:
        return (x["1"] * x[1]).mean()


@pytest.mark.parametrize("keys, dims", [(("1", 1), (0, None)), ((1, "1"), (None, 0))])
def test_inputs_of_one_name_have_samples_of_their_own(keys: Any, dims: Any) -> None:
    values = {"1": torch.zeros(4, 3), 1: torch.tensor(2.0)}
    call = ModelCall.of(Twice(), ({key: values[key] for key in keys},))
    assert Inputs.of(ss.Batch(), Twice(), call).dims == dims
