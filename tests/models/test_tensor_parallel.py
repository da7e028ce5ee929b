"""Tensor parallelism cuts every linear map of a block, except the listed ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.graph import is_map
from superscaler_core.plans import PLANS
from tests.covering import each_value
from tests.models.cells import _graph
from tests.models.families import FAMILIES

WHOLE: Mapping[str, set[str]] = {
    # One map for the queries of several heads, and for the key and value that all heads share.
    "Falcon": {"self_attention.query_key_value"},
    # The pieces of this map have different sizes.
    "Phi-3": {"self_attn.qkv_proj"},
    # It maps the width of one stage to the width of the next stage.
    "Swin": {"downsample.reduction"},
    # It follows the blocks of the first of two models.
    "CLIP": {"visual_projection"},
    # Small maps to few features, which all heads read.
    "DeepSeek-V3": {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
    # Scores of experts, which every device needs.
    "Mixtral": {"mlp.gate"},
    "Qwen3-MoE": {"mlp.gate"},
    "gpt-oss": {"mlp.router"},
}
"""The maps that are not cut, by family."""


@each_value(family=[*WHOLE, *sorted({*FAMILIES} - {*WHOLE})[::6]], num_devices=[2, 4])
def test_every_linear_map_of_a_block_is_cut_except_the_listed_ones(
    family: str, num_devices: int
) -> None:
    plan = ss.Plan(_graph(family), range(num_devices))
    PLANS["megatron"](plan)
    whole = {
        re.sub(r".*\.\d+\.", "", op.module)
        for block in plan.blocks.all
        for op in block
        if is_map(op) and len({part.pieces for part in plan.parts(op)}) == 1
    }
    assert whole == WHOLE.get(family, set())


@pytest.mark.parametrize("family", ["GPT-2", "Bloom", "T5", "Phi-3"])
def test_degree_that_does_not_divide_the_heads_is_rejected_with_valid_degrees(family: str) -> None:
    plan = ss.Plan(_graph(family), range(3))
    with pytest.raises(PlanError, match=r"into 3 parts: its size is .*can be cut into 1, 2, 4\.$"):
        PLANS["megatron"](plan)
