"""Played tape: segments that are replayed have the footprints of segments that are run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.known import Known
from superscaler_core.memory import dry_run, footprint, played_tape
from superscaler_core.memory.footprint import Footprint, footprints
from superscaler_core.memory.segment_trace import Layouts
from superscaler_core.run.tape import Tape
from tests.superscaler_core.memory.test_stage_form import compiled
from tests.superscaler_core.plans import test_halves, test_plans
from tests.superscaler_core.training import Case

CASES = list({(c.plan, c.rewrite): c for c in (*test_plans.CASES, *test_halves.CASES)}.values())
"""One training case of every plan and rewrite; all cases would take minutes."""


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_tape, "_FORWARDS", Known(played_tape.MAX_TRACES))
    monkeypatch.setattr(played_tape, "_BACKWARDS", Known(played_tape.MAX_TRACES))
    forget_stages(monkeypatch)


def forget_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_KNOWN", {})
    monkeypatch.setattr(footprint, "_FOUND", WeakKeyDictionary())


def all_footprints(program: ss.Compiled, dtype: str | None) -> Mapping[Any, Footprint]:
    return {
        (device, *run): found
        for device in program.plan.devices
        for run, found in footprints(program.materialized, device, dtype).items()
    }


def run_all(*args: Any) -> Tape:
    """A tape that runs every segment."""
    recomputed, swapped, host, *_ = args
    return Tape(recomputed, swapped, host)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_footprints_are_those_of_segments_that_are_run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, dtype = case.compiled(), "float64" if case.dtype == "float32" else "float32"
    found = [all_footprints(program, dtype)]
    forget_stages(monkeypatch)
    found.append(all_footprints(program, dtype))
    forget_stages(monkeypatch)
    monkeypatch.setattr(dry_run, "PlayedTape", run_all)
    expected = all_footprints(program, dtype)
    assert found == [expected, expected]


@pytest.mark.usefixtures("nothing_known")
def test_equal_layers_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with twice as many layers has the same number of different segments."""
    _ = compiled("megatron", layers=4).memory
    counts = len(played_tape._FORWARDS), len(played_tape._BACKWARDS)
    assert min(counts) > 0
    _ = compiled("megatron", layers=8).memory
    assert (len(played_tape._FORWARDS), len(played_tape._BACKWARDS)) == counts


@pytest.mark.usefixtures("nothing_known")
def test_number_of_remembered_segments_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled("megatron").memory
    forget_stages(monkeypatch)
    for name in ("_FORWARDS", "_BACKWARDS"):
        monkeypatch.setattr(played_tape, name, Known(2))
    assert compiled("megatron").memory == expected
    assert (len(played_tape._FORWARDS), len(played_tape._BACKWARDS)) == (2, 2)


def test_tensors_made_from_layouts_keep_their_shared_storage() -> None:
    base = torch.empty(4, 6, device="meta")
    given: list[Tensor | None] = [base, base[1:, ::2], None, torch.empty(3, 1, device="meta")]
    layouts = Layouts.of(given)
    made = layouts.made()
    assert layouts.sizes == (4 * 6 * 4, 3 * 4)
    assert Layouts.of(made) == layouts
    first, second, *_ = (x.untyped_storage() for x in made if x is not None)
    assert first is second
