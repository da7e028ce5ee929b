"""``parallelize`` validates what it is given before any rank works on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.parallel import SProgram
from tests.superscaler_core.parallel.small_nets import batch, net


@pytest.mark.parametrize(
    "options, match",
    [
        ({"dtype": torch.int8}, "no dtype of stored parameters 'int8'"),
        ({"batch": "local"}, "batch takes an ss.Batch, such as"),
        ({"plan": "gpipe", "options": {"microbatches": 0}}, "gpipe takes at least one microbatch"),
        ({"plan": "hybrid", "options": {"tp": "two"}}, "hybrid:tp=two: expected a whole number"),
        ({"plan": "stages", "options": {"profile": "a1000"}}, "stages:profile=a1000: expected one"),
    ],
)
def test_values_that_are_not_known_raise_plan_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ss.PlanError, match=match):
        ss.parallelize(net(), kwargs={"x": batch()}, **options)


def test_option_given_as_a_text_is_read_as_in_the_text_of_the_plan() -> None:
    texts = SProgram.of("hybrid", {"tp": "2", "sizes": "3,1", "keep": "block_inputs"})
    assert texts.options == SProgram.of("hybrid:tp=2,sizes=3,1,keep=block_inputs").options
