"""Captured graphs: each size is captured once, by one process, and the time is measured."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import superscaler_core as ss
from superscaler_core.evaluation import microbatches
from superscaler_core.evaluation.microbatches import Captured, Captures
from superscaler_core.front_end import ModelCall
from superscaler_core.models import build, example_inputs
from tests.superscaler_core.planners.test_search import graph, request


def test_each_size_is_captured_once_and_the_longest_time_is_known() -> None:
    asked: list[int] = []

    def capture(samples: int) -> ss.Graph:
        asked.append(samples)
        time.sleep(0.01 * samples)
        return graph("mlp", samples)

    captured = Captured(capture, (2, 4))
    assert not captured.sizes
    captured.begin(1)
    assert asked == [4, 2]
    assert {*captured.sizes} == {2, 4}
    assert captured(2) is captured(2) is graph("mlp", 2)
    assert asked == [4, 2]
    assert captured.secs >= 0.04
    assert Captured(capture, (2, 4), secs=100.0).secs == 100.0


def test_only_sizes_that_were_not_captured_take_time_to_check() -> None:
    captured = Captured(request().graph_of, (2, 4), secs=7.0)
    captured.begin()
    asked = replace(request(), captured=captured)
    assert [asked.check_secs(samples) for samples in (2, 4, 8)] == [0, 0, 7]
    assert request().check_secs(8) == 0


def test_copies_of_a_model_capture_a_size_once_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num = 0

    def capture(*args: Any, **kwargs: Any) -> ss.Graph:
        nonlocal num
        num += 1
        time.sleep(0.2)
        return graph("mlp", 2)

    monkeypatch.setattr(microbatches, "capture", capture)
    model = build("mlp")
    captures = Captures(model, ModelCall.of(model, example_inputs("mlp", 2)), {})
    copies = [captures, *(pickle.loads(pickle.dumps(captures)) for _ in range(3))]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda copy: copy(2), copies)]
    assert num == 1
    assert {len(each.ops) for each in found} == {len(graph("mlp", 2).ops)}
    folder = captures.__dict__["_folder"]
    assert isinstance(folder, Path)
    assert {path.suffix for path in folder.iterdir()} == {".lock", ".pickle"}
