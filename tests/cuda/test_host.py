"""On a GPU: tensors that are copied to pinned memory and back keep their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import superscaler_core as ss
from superscaler_core import Trainer
from superscaler_core.run import Host
from tests.superscaler_core.cases import Case

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"),
]


def test_reused_device_memory_does_not_change_a_copy_to_the_host() -> None:
    host, kept = Host("cuda"), []
    for value in range(20):
        x = torch.full((1 << 20,), float(value), device="cuda")
        kept.append(host.to_host(x))
        del x
    arrivals = [host.to_device(copy) for copy in kept]
    host.wait()
    for value, (copy, arrival) in enumerate(zip(kept, arrivals, strict=True)):
        assert copy.is_pinned()
        assert (copy == value).all()
        assert (arrival() == value).all().item()


def step(case: Case, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of a step of a program of one rank on the GPU."""

    def work(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
        trainer.load_state_dict(case.new_model().state_dict())
        loss = trainer.step(*case.inputs(0))
        grads = {name: weight.grad for name, weight in trainer.named_parameters()}
        return loss.item(), {name: grad for name, grad in grads.items() if grad is not None}

    folder = case.compiled().save(folder)
    (found,) = ss.run_threads(folder, work, range(1), device="cuda").values()
    return found


@pytest.mark.parametrize("name", ["zero_offload", "zero3_offload", "swap"])
def test_offload_and_swap_do_not_change_loss_and_gradients(name: str, tmp_path: Path) -> None:
    plain = step(Case("data_parallel", 1, sizes={"layers": 4}), tmp_path / "plain")
    other = step(Case(name, 1, sizes={"layers": 4}), tmp_path / "other")
    place = "cuda" if name == "swap" else "cpu"
    assert {grad.device.type for grad in other[1].values()} == {place}
    assert plain[0] == pytest.approx(other[0], rel=1e-12)
    assert plain[1].keys() == other[1].keys()
    for key, grad in plain[1].items():
        torch.testing.assert_close(other[1][key].cpu(), grad.cpu(), rtol=1e-9, atol=1e-12)
