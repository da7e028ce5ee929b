"""Options: texts of the command line are parsed to the values that plans take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import superscaler_core as ss
from rvdcomm.cli import UsageError
from superscaler_core.cli.sources import Source, plan_source, settings_of
from superscaler_core.parallel import SProgram
from superscaler_core.plan import Keep, Plan
from superscaler_core.plans import EVOFORMER, PLANS, Cut, cuts, parse_plan, readers_of
from superscaler_core.published.alphafold2.branch_parallel import EVOFORMER as BRANCHES
from superscaler_core.published.alphafold2.branch_parallel import branches_of
from tests.superscaler_core.cases import Case

MODEL = Source("model", {"experts": 4, "layers": 2}, lambda: None)


def options_of(plan: str, *texts: str) -> dict[str, Any]:
    return settings_of(MODEL, plan_source(plan), texts)[1]


@pytest.mark.parametrize(
    ("plan", "text", "value"),
    [
        ("gpipe", "sizes=3,2", (3, 2)),
        ("gpipe", "sizes=", ()),
        ("coshard", "blocks=0-3,8", (0, 1, 2, 3, 8)),
        ("coshard", "blocks=", None),
        ("hybrid", "coshard_blocks=1", (1,)),
        ("hybrid", "keep=block_inputs", Keep.BLOCK_INPUTS),
        ("hybrid", "keep_coshard=everything", Keep.EVERYTHING),
        ("dap", "modules=*.a:1, *.b:2>1",
                (Cut(ss.Modules("*.a"), 1), Cut(ss.Modules("*.b"), 2, 1))),
        ("branch_parallel", "branches=a.*,b; c", (ss.Modules("a.*", "b"), ss.Modules("c"))),
        ("zero3", "block=layers.*", ss.Modules("layers.*")),
        ("megatron", "features=h.*.fc.weight:0,h.*.q:1", (("h.*.fc.weight", 0), ("h.*.q", 1))),
        ("expert_parallel", "expert=*.experts", ss.Modules("*.experts")),
        ("megatron", "plan.experts=yes", True),
        ("zero3", "keep=block_inputs", Keep.BLOCK_INPUTS),
        ("swap", "overlap=prefetch 2 reductions", ss.Overlap(prefetch=2, reductions=True)),
        ("swap", "overlap=true", True),
        ("interlaced", "embedding=wte.weight", "wte.weight"),
        ("hybrid", "zero=3", 3),
        ("hybrid", "tp=4", 4),
    ],
)  # fmt: skip
def test_option_text_is_parsed_to_its_value(plan: str, text: str, value: object) -> None:
    (found,) = options_of(plan, text).values()
    assert found == value
    assert parse_plan(f"{plan}:{text.removeprefix('plan.')}")[1] == options_of(plan, text)


def test_plan_text_may_contain_options() -> None:
    text = "hybrid: tp=2,sizes=3,1,keep=block_inputs"
    said = {"tp": 2, "sizes": (3, 1), "keep": Keep.BLOCK_INPUTS}
    assert parse_plan(text) == ("hybrid", said)
    assert parse_plan("mine.py:split") == ("mine.py:split", {})
    assert SProgram.of(text, {"tp": 4}).options == {**said, "tp": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hybrid:dp=2", "not 'dp=2'; hybrid takes tp, pp, microbatches"),
        ("hybrid:tp=2,pp", "hybrid:tp=2,pp: expected a whole number, such as 1"),
        ("hybrid:pp", "expected hybrid:OPTION=VALUE"),
        (
            "zero3:x=1",
            "zero3 takes nothing, and every plan block, features, expert, embedding",
        ),
    ],
)
def test_invalid_options_in_a_plan_text_raise_plan_error(text: str, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        parse_plan(text)


@pytest.mark.parametrize(
    ("plan", "text", "words"),
    [
        ("gpipe", "sizes=3,x", "--set sizes=3,x: expected whole numbers with commas between"),
        ("coshard", "blocks=a-b", "expected numbers of blocks, such as 0-3,8"),
        ("hybrid", "keep=nothing", "expected one of everything, attention_only, segment_inputs"),
        ("dap", "modules=tri_in", r"expected PATTERN:DIM or PATTERN:DIM>DIM"),
        ("dap", "modules=tri_in:1>b", r"expected PATTERN:DIM or PATTERN:DIM>DIM"),
        ("megatron", "features=up.weight", "expected NAME:DIM with commas between"),
        ("megatron", "blocks=1", "the plan megatron takes vocabulary"),
        ("hybrid", "whole=so", "expected true or false"),
        ("hybrid", "zero=all", "expected 1 for states, 2 for gradients too"),
        ("zero3", "overlap=much", "expected true, or some of: prefetch NUMBER"),
    ],
)
def test_malformed_option_text_is_rejected(plan: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options_of(plan, text)


def test_every_non_numeric_option_has_a_reader() -> None:
    """Only options that are not numbers need a reader."""
    options = {
        f"{name}:{parameter.name}": parameter.name in readers_of(plan)
        for name, plan in PLANS.items()
        for parameter in list(inspect.signature(plan).parameters.values())[1:]
        if not isinstance(parameter.default, bool | int)
    }
    assert [option for option, is_read in options.items() if not is_read] == []


def test_setting_of_both_model_and_plan_goes_to_the_model() -> None:
    model, plan = settings_of(MODEL, plan_source("expert_parallel"), ["experts=8"])
    assert (model, plan) == ({"experts": 8}, {})


def test_block_and_features_settings_override_detection() -> None:
    plan = Plan(Case("data_parallel", 2).compiled().plan.graph, range(2))
    texts = ["block=layers.1", "features=*.mlp.up.weight:0"]
    plan_source("megatron").call(plan, **options_of("megatron", *texts))
    assert len(plan.blocks.all) == 1
    cut = {part.op.module for op in plan.graph.ops for part in plan.parts(op) if part.pieces}
    assert cut == {f"layers.{i}.mlp{name}" for i in (0, 1) for name in ("", ".up", ".down")}


def test_default_cuts_and_branches_equal_their_text_form() -> None:
    text = (
        "*.msa_row:1, *.msa_col:2, *.msa_transition:2, *.outer:2>1, *.tri_out:1, *.tri_in:2, "
        "*.tri_start:1, *.tri_end:2, *.pair_transition:1"
    )
    assert cuts(text) == EVOFORMER
    assert branches_of("layers.*.msa_*; layers.*.outer,layers.*.tri_*,"
                            "layers.*.pair_transition") == BRANCHES  # fmt: skip
