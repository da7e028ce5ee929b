"""Under tensor parallel no linear map of a block is whole on every device, but for those named."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.graph.repeats import is_map
from superscaler_core.plans import PLANS
from tests.models.cells import _graph
from tests.models.experts import MIXTURES
from tests.models.families import FAMILIES

WHOLE: Mapping[str, set[str]] = {
    # Queries of several heads, and the keys and values of one head, which all of them read.
    "Falcon": {"self_attention.query_key_value"},
    # Pieces of different sizes.
    "Phi-3": {"self_attn.qkv_proj"},
    # From the width of one stage to that of the next.
    "Swin": {"downsample.reduction"},
    # Behind the blocks of the first model of two.
    "CLIP": {"visual_projection"},
    # Small maps, to few features that all heads read.
    "DeepSeek-V3": {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
    # Scores of experts, which every device needs.
    "Mixtral": {"mlp.gate"},
    "Qwen3-MoE": {"mlp.gate"},
    "gpt-oss": {"mlp.router"},
}
"""The maps that are whole, by family."""


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("family", [*FAMILIES, *(name for name in MIXTURES if "," not in name)])
def test_every_map_of_a_block_is_cut(family: str, num_devices: int) -> None:
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
def test_a_degree_that_does_not_divide_the_heads_is_refused_with_those_that_do(family: str) -> None:
    plan = ss.Plan(_graph(family), range(3))
    with pytest.raises(PlanError, match=r"into 3 parts: its size is .*can be cut into 1, 2, 4\.$"):
        PLANS["megatron"](plan)
