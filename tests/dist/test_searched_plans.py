"""Laws of searched plans on real processes: they train as one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core import Found
from superscaler_core.cost import DeviceProfile
from superscaler_core.evaluation import Candidate, compiled
from tests.dist.test_superscaler import NUM_RANKS, TOLERANCE, case_to_folder, differences
from tests.dist.world import Worlds
from tests.superscaler_core.cases import Case

pytestmark = pytest.mark.dist

MODELS: dict[str, dict[str, Any]] = {
    "moe": {"heads": 8, "experts": 8, "top": 2, "capacity_factor": 2.5},
    "mbart": {"heads": 8},
}
"""Sizes beside those of ``tiny``."""

BATCH = 8
SLOW = DeviceProfile("slow", {"float64": 1e9}, 1e9, 1 << 30)
"""A slow device, so that several devices pay off for a tiny model."""
MAX_TRIED, MAX_PLANS = 6, 2

KIB = 240
"""Memory of each of four devices in KiB, too little for a copy of the model."""


@dataclass(frozen=True)
class SearchedCase(Case):
    """A candidate of a search: ``plan`` is its name, and ``batch`` its microbatch."""

    found: Found | None = None
    sprogram: Any = None

    def compiled(self) -> ss.Compiled:
        assert self.found is not None
        return compiled(self.found.request, Candidate("", self.batch, self.sprogram))


@cache
def graph(model: str, samples: int) -> ss.Graph:
    case = Case("", 1, model=model, sizes=MODELS[model], batch=samples)
    return ss.capture(case.new_model(), case.inputs(0))


def cases_of(model: str, num_devices: int) -> list[SearchedCase]:
    """What a search chooses, and the fastest of its plans with other numbers of groups."""
    found = ss.search(
        lambda samples: graph(model, samples),
        topology=rv.Topology.single_host(num_devices, 1e-6, 1e9),
        batch=BATCH,
        samples=(4, 8),
        profile=SLOW,
        memory_bytes=KIB << 10 if num_devices == 4 else None,
        max_tried=MAX_TRIED,
        optimizer="momentum",
    )
    layouts: dict[tuple[str, ...], Candidate] = {}
    for trial in sorted((t for t in found.tried if t.fits), key=lambda trial: trial.secs):
        layouts.setdefault(tuple(trial.candidate.name.split()[:4]), trial.candidate)
    return [
        SearchedCase(
            each.name, num_devices, model=model, sizes=MODELS[model], batch=each.samples,
            num_steps=2, found=found, sprogram=each.sprogram,
        )
        for each in list(layouts.values())[:MAX_PLANS]
    ]  # fmt: skip


@pytest.mark.parametrize("model, num_devices", [("moe", 8), ("mbart", 4)])
def test_plans_found_by_the_search_train_as_one_device(
    worlds: Worlds, model: str, num_devices: int, tmp_path: Path
) -> None:
    errors = []
    for number, case in enumerate(cases_of(model, num_devices)):
        folder = tmp_path / str(number)
        folder.mkdir()
        case_to_folder(case, folder)
        sent = replace(case, found=None, sprogram=None)
        errors += worlds(NUM_RANKS).run(differences, folder, sent)[:num_devices]
    assert len(errors) >= num_devices
    assert [one for one in errors if not one <= TOLERANCE["float64"]] == []
