"""``optim.Averaged``: averages of boxes are the boxes of torch's averages."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rvdcomm as rv
import superscaler_core as ss
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


def third(old: Tensor, value: Tensor, num: int) -> Tensor:
    return old + (value - old) / (num + 3)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ema": ({"decay": 0.9}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
    "swa": ({}, {}),
    "own": ({"average": third}, {"avg_fn": third}),
}


def train(model: Any, step: Callable[[], Any], averages: Callable[[], Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        step()
        optimizer.step()
        optimizer.zero_grad()
        averages()


@pytest.mark.parametrize("plan", ["zero3", "one_f_one_b:microbatches=2"])
@pytest.mark.parametrize("kind", KINDS)
def test_averages_are_those_of_torch(kind: str, plan: str, tmp_path: Path) -> None:
    ours, theirs = KINDS[kind]
    model = net()
    wanted = AveragedModel(model, **theirs)
    train(model, lambda: model(x=batch()).backward(), lambda: wanted.update_parameters(model))
    want = wanted.module.state_dict()

    def work(parallel: ss.Parallel) -> dict[str, Tensor]:
        averaged = ss.optim.Averaged(parallel, **ours)
        train(parallel, lambda: parallel.step(x=batch()), averaged.update)
        before = parallel.state_dict()
        with averaged.applied():
            found = parallel.state_dict()
            loss = parallel.evaluate(x=batch())
        torch.testing.assert_close(loss, wanted.module.eval()(x=batch()), rtol=1e-12, atol=0)
        after = parallel.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        return found

    for found in on_threads(net(), {"x": batch()}, 2, work, plan=plan).values():
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_that_are_loaded_go_on_as_without_a_break(kind: str, tmp_path: Path) -> None:
    def averages(parallel: ss.Parallel, averaged: ss.optim.Averaged) -> dict[str, Tensor]:
        train(parallel, lambda: parallel.step(x=batch()), averaged.update)
        with averaged.applied():
            return parallel.state_dict()

    def start(parallel: ss.Parallel) -> dict[str, Tensor]:
        averaged = ss.optim.Averaged(parallel, **KINDS[kind][0])
        averages(parallel, averaged)
        parallel.save(tmp_path / "model")
        averaged.save(tmp_path / "averages")
        return averages(parallel, averaged)

    def go_on(parallel: ss.Parallel) -> dict[str, Tensor]:
        averaged = ss.optim.Averaged(parallel, **KINDS[kind][0])
        parallel.load(tmp_path / "model")
        with pytest.raises(rv.CheckpointError, match=r"was not written by Averaged\.save"):
            averaged.load(tmp_path / "model")
        averaged.load(tmp_path / "averages")
        return averages(parallel, averaged)

    want = on_threads(net(), {"x": batch()}, 2, start, plan="zero3")[0]
    for found in on_threads(net(), {"x": batch()}, 2, go_on, plan="data_parallel").values():
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def test_averages_put_there_by_hand_count_if_it_is_known_how_much() -> None:
    def work(parallel: ss.Parallel) -> None:
        for options in ({"decay": 0.9}, {}):
            averaged = ss.optim.Averaged(parallel, **options)
            with averaged.applied(), torch.no_grad():
                for parameter in parallel.parameters():
                    parameter.zero_()
            if options:
                averaged.update()
                with averaged.applied():
                    found = [parameter.detach().clone() for parameter in parallel.parameters()]
                for mine, value in zip(found, parallel.parameters(), strict=True):
                    torch.testing.assert_close(mine, 0.1 * value.detach())
            else:
                with pytest.raises(ss.PlanError, match=r"save and load them by ema\.save"):
                    averaged.update()

    on_threads(net(), {"x": batch()}, 1, work)


def test_copy_of_a_parallel_model_names_the_averages() -> None:
    def work(parallel: ss.Parallel) -> None:
        with pytest.raises(ss.PlanError, match=r"there is ss\.optim\.Averaged"):
            deepcopy(parallel)
        with pytest.raises(ss.PlanError, match="a decay from 0 to 1 or an average, not 2"):
            ss.optim.Averaged(parallel, decay=2)

    on_threads(net(), {"x": batch()}, 1, work)
