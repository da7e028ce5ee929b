"""Early receives on edges between stages. Threads only log them and receive nothing early."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.run.transport import Handle, ThreadCall
from tests.superscaler_core.small import two_linears

GRAPH = two_linears()
STATE = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in GRAPH.parameters.items()}
MICROBATCHES = 3

Log = list[tuple[str, int, str]]
"""The calls of ranks: (name, rank, source layout of the transfer)."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found: Log = []
    start = ThreadCall.start

    def write(what: str, call: ThreadCall) -> None:
        found.append((what, call.transport.rank, call.sub_transfer.src))

    def started(call: ThreadCall, tensor: Tensor | None) -> Handle:
        write("brings" if tensor is not None else "receives", call)
        return start(call, tensor)

    monkeypatch.setattr(ThreadCall, "start", started)
    monkeypatch.setattr(ThreadCall, "expect", lambda call: write("expects", call))
    monkeypatch.setattr(ThreadCall, "forget", lambda call: write("forgets", call))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two stages on two devices."""
    plan = ss.Plan(GRAPH, [0, 1])
    for device, stage in enumerate(plan.pipeline([1])):
        for op in stage.ops:
            plan.op_assign(op, device)
    plan.op_order(ss.SCHEDULES["1f1b"](2, MICROBATCHES))
    return ss.compile(plan).save(tmp_path)


def batch() -> Tensor:
    return torch.ones(4 * MICROBATCHES, 6, dtype=torch.float64)


def test_rank_expects_all_but_the_first_microbatch_on_receive_only_edges(
    folder: Path, log: Log
) -> None:
    def work(trainer: ss.Trainer) -> None:
        trainer.load_state_dict(STATE)
        for _ in range(2):
            trainer.step(batch())

    ss.run_threads(folder, work, range(2))
    counts = Counter(log)
    expected = [(rank, src) for what, rank, src in counts if what == "expects"]
    # Rank 1 expects values of rank 0, and rank 0 expects their gradients.
    assert sorted((rank, src[-2]) for rank, src in expected) == [(0, "1"), (1, "0")]
    for rank, src in expected:
        assert counts["receives", rank, src] == 2 * MICROBATCHES
        # The first step only counts the receives.
        assert counts["expects", rank, src] == MICROBATCHES - 1
        mine = [what for what, *where in log if where == [rank, src]]
        second = (["receives", "expects"] * MICROBATCHES)[:-1]
        assert mine == ["receives"] * MICROBATCHES + second
    assert not any(what == "forgets" for what, _, _ in log)


def test_failed_step_forgets_its_expected_receives(folder: Path, log: Log) -> None:
    def work(trainer: ss.Trainer) -> None:
        trainer.load_state_dict(STATE)
        trainer.step(batch())
        if trainer.rank == 1:
            trainer._rank._tape.forward = None  # type: ignore[assignment, method-assign]
        trainer.step(batch())

    with pytest.raises(TypeError, match="not callable"):
        ss.run_threads(folder, work, range(2))
    last = [what for what, rank, src in log if rank == 1 and src.endswith("ranks(0)")]
    assert last == ["receives"] * MICROBATCHES + ["receives", "expects", "forgets"]
