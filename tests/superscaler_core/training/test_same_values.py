"""Values that every rank passes whole are equal on all ranks, or all ranks refuse them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.parallel import Programs, SProgram
from superscaler_core.training.load import in_threads
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


STATES: dict[str, tuple[Callable[[int], dict[str, Any]], bool, str]] = {
    "values of each rank's own": (
        lambda rank: net(rank).state_dict(),
        True,
        "load_state_dict: ranks disagree about the state dict: rank 0 has layers.0.bias [6] "
        "torch.float64 with checksum",
    ),
    "a name that one rank lacks": (
        lambda rank: without(net().state_dict(), "layers.1.bias" if rank else ""),
        True,
        'Missing key(s) in state_dict: "layers.1.bias"',
    ),
    "a name that one rank lacks, not strict": (
        lambda rank: without(net().state_dict(), "layers.1.bias" if rank else ""),
        False,
        "rank 0 has layers.1.bias [6]",
    ),
    "a None": (lambda rank: {**net().state_dict(), "layers.2.weight": None}, False,
     "load_state_dict: 'layers.2.weight' is None, not a tensor."),
    "no values": (lambda rank: {**net().state_dict(), "shift": torch.ones(6, device="meta")}, True,
     "load_state_dict: 'shift' is on the meta device, without values."),
    "another shape on one rank": (
        lambda rank: {**net().state_dict(), "shift": torch.ones(6 - rank)},
        True,
        "size mismatch for shift: copying a param with shape [5]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_state_dicts_that_differ_are_refused_on_all_ranks_and_change_nothing(case: str) -> None:
    make, strict, text = STATES[case]
    states = [make(rank) for rank in range(2)]

    def work(parallel: ss.Parallel) -> tuple[str, dict[str, Tensor]]:
        with pytest.raises(ss.PlanError) as raised:
            parallel.load_state_dict(states[parallel.trainer.rank], strict)
        return str(raised.value), parallel.state_dict()

    for message, state in on_threads(net(), {"x": batch()}, 2, work, plan="zero3").values():
        assert text in message
        torch.testing.assert_close(state, dict(net().state_dict()), rtol=0, atol=0)


def test_initial_values_that_differ_are_refused_on_all_ranks_and_change_nothing() -> None:
    def work(parallel: ss.Parallel) -> tuple[str, dict[str, Tensor]]:
        def init(name: str, weight: Tensor) -> None:
            weight.fill_(float(parallel.trainer.rank and name == "layers.3.bias"))

        with pytest.raises(ss.PlanError) as raised:
            parallel.trainer.init_weights(init)
        state = parallel.state_dict()
        parallel.trainer.init_weights(lambda _, weight: weight.fill_(2.0))
        return str(raised.value), state

    for message, state in on_threads(net(), {"x": batch()}, 2, work, plan="zero3").values():
        assert "init_weights: ranks disagree about the values: rank 0 has layers.3.bias" in message
        torch.testing.assert_close(state, dict(net().state_dict()), rtol=0, atol=0)


def test_seeds_that_differ_are_refused_on_all_ranks() -> None:
    programs = Programs(net(), SProgram.of("data_parallel"), 2)
    call = programs.call((), {"x": batch()})

    def work(transport: Any) -> str:
        with pytest.raises(ss.PlanError) as raised:
            ss.Parallel(programs, call, transport, seed=transport.rank)
        return str(raised.value)

    (text,) = {*in_threads(work, range(2)).values()}
    assert text.startswith("parallelize: ranks disagree about seed: rank 0 has 0, rank 1 has 1")
