"""Laws of sPrograms on real processes: what they train is what one device trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import superscaler_core as ss
from superscaler_core.plans import PLANS
from tests.dist.world import Worlds
from tests.superscaler_core.training import Case, Trained, difference, train, train_alone

pytestmark = pytest.mark.dist

NUM_RANKS = 8

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
FLOOR = {"float64": 1e-3, "float32": 1e-2}
"""Below this a parameter is compared absolutely: a key's bias has no gradient but rounding noise,
and stays near its start at zero, while other parameters are 0.02 and more."""

GPT = {"heads": 8, "layers": 1}
MOE = {"heads": 8, "experts": 8, "top": 2, "capacity_factor": 2.5}
CHUNKS = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2}
"""Stages a device of the pipelines; a stage has a block."""
HYBRID = {
    2: {"pp": 2, "recompute": True, "microbatches": 2},
    4: {"tp": 2, "zero1": True, "microbatches": 2},
    8: {"tp": 2, "pp": 2, "zero1": True, "sequence": True, "vocabulary": True, "microbatches": 4},
}


def case_of(plan: str, num_devices: int, dtype: str) -> Case:
    """A plan with a model that is large enough for so many devices."""
    optimizer = "adamw" if (len(plan) + num_devices // 2) % 2 else "sgd"
    case = Case(plan, num_devices, optimizer=optimizer, dtype=dtype)
    if plan in CHUNKS:
        sizes = {"heads": 8, "layers": CHUNKS[plan] * num_devices}
        return replace(case, knobs={"microbatches": 4}, sizes=sizes, batch=2)
    if plan == "expert_parallel":
        return replace(case, model="moe", sizes=MOE, batch=8)
    if plan == "hybrid":
        return replace(case, knobs=HYBRID[num_devices], sizes={**GPT, "layers": 2}, batch=8)
    return replace(case, sizes=GPT, batch=8)


CASES = [
    case_of(plan, num_devices, dtype)
    for dtype in TOLERANCE
    for num_devices in (2, 4, 8)
    for plan in PLANS
]

_groups: dict[int, Any] = {}


def differences(rank: int, folder: Path, case: Case) -> float | None:
    """Train on the first ranks of the world; how far this one is from training alone."""
    if not _groups:
        _groups.update({num: dist.new_group(range(num)) for num in (2, 4, NUM_RANKS)})
    if rank >= case.num_devices:
        return None
    start, losses, parameters = torch.load(folder / "alone.pt", weights_only=True)
    trainer = ss.load(folder, group=_groups[case.num_devices])
    trained = train(trainer, case, start)
    return difference(trained, Trained(losses, parameters), FLOOR[case.dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan_trains_what_one_device_trains(
    worlds: Worlds, case: Case, tmp_path: Path
) -> None:
    compiled = case.compiled()
    compiled.save(tmp_path)
    alone = train_alone(case, compiled.plan.num_microbatches)
    start = case.new_model().state_dict()
    torch.save((start, alone.losses, dict(alone.parameters)), tmp_path / "alone.pt")
    found = worlds(NUM_RANKS).run(differences, tmp_path, case)[: case.num_devices]
    # Not max(found), which may pass over a NaN.
    assert [one for one in found if not one <= TOLERANCE[case.dtype]] == []
