"""Laws of the benchmark of costs: its questions, its changes of a plan, and its result."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import superscaler_core as ss
from bench import superscaler_cost
from superscaler_core.cost import PROFILES, CostModel
from superscaler_core.models import GPT, GPTConfig


@cache
def tiny() -> ss.Graph:
    with torch.device("meta"):
        sizes = GPTConfig(vocabulary=48, sequence=16, layers=2, width=16, heads=4)
        tokens = torch.empty(8, 16, dtype=torch.int64)
        return ss.capture(GPT(sizes), (tokens, tokens))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superscaler_cost, "gpt", tiny)
    monkeypatch.setattr(superscaler_cost, "MOST_GRIDS", 2)


@pytest.mark.parametrize("op", tiny().ops[:6], ids=lambda op: op.name)
def test_grids_are_different_splits_of_all_devices(op: ss.Op) -> None:
    found = superscaler_cost.grids(op)
    assert len(set(found)) == len(found) > 0
    assert {split.devices for split in found} == {tuple(range(16))}


def test_questions_cover_every_op_and_every_edge() -> None:
    graph = tiny()
    costs = CostModel(graph, PROFILES["a100"], superscaler_cost.TOPOLOGY)
    splits = {op: len(superscaler_cost.grids(op)) for op in graph.ops}
    expected = sum(splits.values()) + sum(
        splits[writer] * splits[reader]
        for tensor, writer in graph.producer.items()
        for reader, _ in graph.readers.get(tensor, ())
    )
    assert len(list(superscaler_cost.questions(graph, costs))) == expected


def test_changes_give_one_op_another_split() -> None:
    plan = superscaler_cost.plan_of(tiny())
    for change in superscaler_cost.changes(plan, 3):
        ((op, split),) = change.items()
        assert split != plan.op_split(op)
        assert split.devices == plan.op_split(op).devices


def test_the_result_has_all_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "costs.json"
    words = ["--only", "questions,candidate,again", "--questions", "50", "--repetitions", "2"]
    assert superscaler_cost.main([*words, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["questions"]["count"] == 50
    samples = result["candidate"]["samples"]
    counts = {name: len(each["wall_secs"]) for name, each in samples.items()}
    assert counts == {"first": 1, "near": 2, "same": 2}
    assert len(result["again"]["samples"]["cpu_secs"]) == 2
    assert result["again"]["step_secs"] == result["candidate"]["step_secs"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == [
        "50", "candidate,", "candidate,", "candidate,", "again", "wrote",
    ]  # fmt: skip
