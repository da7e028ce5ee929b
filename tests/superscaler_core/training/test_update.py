"""Updates by the program: training is the same whether a step or its caller updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.program import Verb
from tests.superscaler_core.cases import OPTIMIZERS, Case, Trained, train

CASES = [
    Case("zero_offload", 2, optimizer="adamw"),
    Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2, "zero": 1}, optimizer="adamw"),
    Case("one_f_one_b", 2, {"microbatches": 2}, sizes={"tied": True, "layers": 2}),
    Case("interlaced", 4, model="mbart"),
]


def updated(trainer: ss.Trainer, case: Case, state: Mapping[str, Tensor]) -> Trained:
    """As ``train``, but steps update weights by themselves."""
    trainer.load_state_dict(state)
    asked: list[list[nn.Parameter]] = []

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        asked.append(list(parameters))
        return OPTIMIZERS[case.optimizer](parameters)

    trainer.update_with(make)
    losses = []
    for step in range(case.num_steps):
        losses.append(trainer.step(*case.inputs(step, trainer.num_microbatches)).item())
        assert all(weight.grad is None for weight in trainer.parameters())
    # Every parameter of the rank is in one update, and each update has one optimizer.
    ids = [id(parameter) for parameters in asked for parameter in parameters]
    assert sorted(ids) == sorted(map(id, trainer.parameters()))
    assert len(trainer.optimizers) == len(asked)
    return Trained(tuple(losses), trainer.state_dict())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_inside_a_step_equal_updates_by_the_caller(case: Case, tmp_path: Path) -> None:
    case.compiled().save(tmp_path)
    start, ranks = case.new_model().state_dict(), range(case.num_devices)
    by_caller = ss.run_threads(tmp_path, lambda trainer: train(trainer, case, start), ranks)
    by_program = ss.run_threads(tmp_path, lambda trainer: updated(trainer, case, start), ranks)
    for rank in ranks:
        mine, others = by_program[rank], by_caller[rank]
        assert mine.losses == others.losses
        assert all(torch.equal(mine.parameters[n], x) for n, x in others.parameters.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parameter_is_updated_once_where_it_is_stored(case: Case) -> None:
    made = case.compiled().materialized
    updates = [i for i in made.step_program.end if i.kind is Verb.UPDATE]
    for tensor, storage in made.weights.storage.items():
        (update,) = (i for i in updates if tensor in made.subject(i))
        assert set(storage.shards) <= set(update.devices)
    assert [i.version for i in updates] == [1] * len(updates)
    assert list(made.step_program.end[-len(updates) :]) == updates
