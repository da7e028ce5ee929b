"""Experts of transformers are dealt out: each device stores its own, and trains as one device."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.parallel import SProgram
from tests.covering import each_value
from tests.models.cells import MODELS, _graph, error
from tests.models.experts import MIXTURES

pytestmark = pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")

PLANS = {
    "expert_parallel": (4, 4),
    "expert_parallel:ep=2": (4, 2),
    "data_parallel:experts=true": (2, 2),
    "zero3:experts=true": (4, 4),
    "megatron:experts=true": (4, 4),
    "hybrid:tp=2,microbatches=2,experts=true": (4, 4),
    "hybrid:pp=2,microbatches=2,experts=true": (4, 2),
    "hybrid:tp=2,pp=2,microbatches=2,experts=true,keep=block_inputs": (4, 2),
}
"""Plans, each with devices and the number of parts into which experts are dealt."""


def filled(family: str, text: str) -> ss.Plan:
    plan = ss.Plan(_graph(family), range(PLANS[text][0]))
    SProgram.of(text)(plan, 1)
    return plan


@each_value(family=MIXTURES, text=PLANS)
def test_experts_that_are_dealt_out_train_as_one_device(family, text, tmp_path):
    assert error(family, ss.compile(filled(family, text)), tmp_path) < MODELS[family].tolerance


@each_value(family=MIXTURES, text=PLANS)
def test_every_device_stores_its_own_experts_alone(family, text):
    made = ss.compile(filled(family, text)).materialized
    num = PLANS[text][1]
    experts = {t for op in made.plan.blocks.experts for t in op.parameters if len(t.shape) == 3}
    assert experts
    for tensor in experts:
        shards = made.weights.storage[tensor].shards.values()
        assert {shard.box.shape[0] for shard in shards} <= {tensor.shape[0] // num}
