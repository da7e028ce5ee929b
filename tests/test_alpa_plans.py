"""Alpa's published plans fit the models and the numbers of GPUs that they are listed for."""

from __future__ import annotations

from math import prod

import pytest

from bench.alpa_plans import PUBLISHED
from bench.search.models import ALPA_MODELS


@pytest.mark.parametrize("name", ALPA_MODELS)
def test_a_published_plan_uses_all_gpus_and_whole_blocks(name: str) -> None:
    plan, model = PUBLISHED[name], ALPA_MODELS[name]
    sizes = model.workload.sizes
    num_blocks = sizes["layers"] if "layers" in sizes else sum(sizes["blocks"])
    assert len(plan.layers) == len(plan.meshes)
    assert sum(map(prod, plan.meshes)) == model.num_gpus
    assert num_blocks % sum(plan.layers) == 0
    assert model.workload.batch % plan.microbatches == 0
