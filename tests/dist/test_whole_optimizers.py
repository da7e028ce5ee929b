"""Optimizers that need whole parameters, averages and scaled steps on processes, beside torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import superscaler_core as ss
from tests.dist.world import Worlds
from tests.superscaler_core.optim.others import LAMB, LARS, SAM, SOAP, Shampoo
from tests.superscaler_core.parallel.small_nets import batch, net

pytestmark = pytest.mark.dist

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Shampoo": (Shampoo, {}),
    "SOAP": (SOAP, {}),
    "LAMB": (LAMB, {}),
    "LARS": (LARS, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "SAM": (SAM, {"lr": 0.1, "momentum": 0.9}),
}
Found = dict[str, dict[str, Tensor]]
"""The state of the model and of its averages after five steps, by optimizer."""


def trained(rank: int, plan: str, folder: Path) -> Found:
    """Each optimizer in turn on one model; states are saved and loaded after the third step."""
    found: Found = {}
    parallel = ss.parallelize(net(), kwargs={"x": batch()}, plan=plan)
    for name, (of, options) in OPTIMIZERS.items():
        parallel.load_state_dict(net().state_dict())
        optimizer = ss.optim.whole(of, parallel, **options)
        ema = ss.optim.Averaged(parallel, decay=0.5)
        for step in range(5):
            for part in batch().chunk(2):
                with parallel.scaled(0.5):
                    parallel.step(x=part)
            optimizer.step(*([lambda: parallel.step(x=batch())] if of is SAM else []))
            optimizer.zero_grad()
            ema.update()
            # The optimizer that SAM wraps keeps a state that SAM does not tell of.
            if step == 2 and of is not SAM:
                parallel.save(folder / name, optimizer=optimizer, step=step)
                optimizer = ss.optim.whole(of, parallel, **options)
                parallel.load(folder / name, optimizer=optimizer)
        found[name] = parallel.state_dict()
        with ema.applied():
            found[f"averages with {name}"] = parallel.state_dict()
    return found


def alone() -> Found:
    """The same in torch on one device."""
    found: Found = {}
    for name, (of, options) in OPTIMIZERS.items():
        model = net()
        optimizer = of(model.parameters(), **options)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

        def backward(x: Tensor, factor: float = 1.0, model: Any = model) -> Tensor:
            loss: Tensor = model(x=x) * factor
            loss.backward()
            return loss

        for _ in range(5):
            for part in batch().chunk(2):
                backward(part, 0.5)
            optimizer.step(*([lambda: backward(batch())] if of is SAM else []))
            optimizer.zero_grad()
            ema.update_parameters(model)
        found[name], found[f"averages with {name}"] = model.state_dict(), ema.module.state_dict()
    return found


@pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [
        ("zero3:keep=block_inputs", 2),
        ("hybrid:tp=2,pp=2,microbatches=2,zero=1", 4),
        ("data_parallel:zero=1,whole=true,overlap=true", 4),
    ],
)
def test_steps_are_those_of_one_device(
    worlds: Worlds, tmp_path: Path, plan: str, num_ranks: int
) -> None:
    want = alone()
    for found in worlds(num_ranks).run(trained, plan, tmp_path):
        for name, state in want.items():
            for key, value in state.items():
                torch.testing.assert_close(
                    found[name][key], value, rtol=1e-11, atol=1e-12, msg=f"{name}: {key}"
                )
