"""Text forms: functions of identical devices are written once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.codegen import rank_file
from superscaler_core.codegen.rank_file import rank_files
from superscaler_core.codegen.stage_writer import StageWriter
from superscaler_core.models.gpt import GPT, GPTConfig
from superscaler_core.plan import Keep
from superscaler_core.plans import PLANS
from superscaler_core.program import Materialized, materialize


@cache
def made(name: str, **knobs: Any) -> Materialized:
    with torch.device("meta"):
        sizes = GPTConfig(vocabulary=48, sequence=16, layers=4, width=16, heads=4)
        tokens = torch.empty(8, 16, dtype=torch.int64)
        graph = ss.capture(GPT(sizes), (tokens, tokens))
    plan = ss.Plan(graph, range(8))
    PLANS[name](plan, **knobs)
    return materialize(plan)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("hybrid", {"tp": 2, "pp": 2, "microbatches": 4}),
    ("hybrid", {"tp": 2, "pp": 2, "microbatches": 4, "sequence": True, "zero1": True}),
    ("hybrid", {"tp": 2, "pp": 2, "chunks": 2, "microbatches": 4, "keep": Keep.SEGMENT_INPUTS}),
    ("hybrid", {"tp": 2, "pp": 2, "microbatches": 2, "keep": Keep.BLOCK_INPUTS}),
    ("zero3", {}),
    ("swap", {}),
    ("coshard", {}),
    ("sequence_parallel", {}),
]


@pytest.mark.parametrize(("name", "knobs"), CASES, ids=lambda value: str(value))
def test_sharing_function_texts_does_not_change_the_files(name: str, knobs: dict[str, Any]) -> None:
    program = made(name, **knobs)
    alone = {device: rank_file._rank_file(program, device, {}) for device in program.plan.devices}
    assert rank_files(program) == alone


def test_functions_of_identical_devices_are_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    functions = StageWriter.functions

    def counted(self: StageWriter) -> list[str]:
        seen.append(self._device)
        return functions(self)

    monkeypatch.setattr(StageWriter, "functions", counted)
    rank_files(made("hybrid", tp=2, pp=2, microbatches=4))
    # The data parallel devices of a stage differ only in the samples that they read.
    assert len(seen) == 4
