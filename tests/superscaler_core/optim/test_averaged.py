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
            parallel.save(tmp_path / "averages")
        torch.testing.assert_close(loss, wanted.module.eval()(x=batch()), rtol=1e-12, atol=0)
        after = parallel.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        again = ss.optim.Averaged(parallel, **ours)
        with again.applied():
            parallel.load(tmp_path / "averages")
        with again.applied():
            read = parallel.state_dict()
        assert all(torch.equal(read[name], value) for name, value in found.items())
        return found

    for found in on_threads(net(), {"x": batch()}, 2, work, plan=plan).values():
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def test_copy_of_a_parallel_model_names_the_averages() -> None:
    def work(parallel: ss.Parallel) -> None:
        with pytest.raises(ss.PlanError, match=r"there is ss\.optim\.Averaged"):
            deepcopy(parallel)
        with pytest.raises(ss.PlanError, match="a decay from 0 to 1 or an average, not 2"):
            ss.optim.Averaged(parallel, decay=2)

    on_threads(net(), {"x": batch()}, 1, work)
