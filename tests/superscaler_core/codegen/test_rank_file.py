"""Rank files: what does the same is written once, for all devices and all blocks of a model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.codegen import rank_file, rank_files, rank_text, tables_of
from superscaler_core.codegen.stage_writer import StageWriter
from superscaler_core.materialize import Materialized, materialize
from superscaler_core.models import GPT, GPTConfig
from superscaler_core.plans import PLANS, fill
from superscaler_core.training import module_from


@cache
def made(name: str, layers: int = 4, **options: Any) -> Materialized:
    with torch.device("meta"):
        sizes = GPTConfig(vocabulary=48, sequence=16, layers=layers, width=16, heads=4)
        tokens = torch.empty(8, 16, dtype=torch.int64)
        graph = ss.capture(GPT(sizes), (tokens, tokens))
    plan = ss.Plan(graph, range(8))
    fill(plan, PLANS[name], options)
    return materialize(plan)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("hybrid", {"tp": 2, "pp": 2, "microbatches": 4, "sequence": True, "zero": 1}),
    ("hybrid", {"tp": 2, "pp": 2, "chunks": 2, "microbatches": 4, "keep": ss.Keep.SEGMENT_INPUTS}),
    ("zero3", {}),
    ("coshard", {}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_sharing_function_texts_changes_neither_files_nor_tables(
    name: str, options: dict[str, Any]
) -> None:
    program = made(name, **options)
    alone = {device: rank_file._rank_file(program, device, {}) for device in program.plan.devices}
    assert rank_files(program) == alone
    for device in program.plan.devices[::3]:
        module = module_from(rank_files(program)[device], device)
        assert tables_of(program, device) == module.TABLES


def test_functions_of_identical_devices_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    functions = StageWriter.stage_functions

    def counted(self: StageWriter) -> list[str]:
        seen.append(self._device)
        return functions(self)

    monkeypatch.setattr(StageWriter, "stage_functions", counted)
    rank_files(made("hybrid", tp=2, pp=2, microbatches=4))
    # The data parallel devices of a stage differ only in the samples that they read, and those of a
    # tensor parallel group in the rows of the vocabulary that the first and the last stage have.
    assert len(seen) <= 4


@pytest.mark.parametrize(("name", "options"), [("hybrid", {"tp": 2}), ("zero3", {})], ids=str)
def test_a_deep_model_has_the_functions_of_one_block(name: str, options: dict[str, Any]) -> None:
    few, more, many = (rank_text(made(name, layers=layers, **options), 0) for layers in (2, 4, 8))
    assert many.count("\n") < 3 * few.count("\n")
    assert many.count("F.linear(") == more.count("F.linear(")
