"""Options: the settings that a search begins with."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.models import build, example_inputs
from superscaler_core.planners.auto import Setting, options_of
from superscaler_core.planners.auto.families import Filling
from tests.superscaler_core.planners.auto.test_estimate import REQUEST
from tests.superscaler_core.planners.test_search import request


def roots(memory_bytes: float, **layout: int) -> list[Setting]:
    """The roots of one layout, without ZeRO."""
    options = options_of(replace(REQUEST, memory_bytes=memory_bytes))
    return [
        root
        for root in options.roots()
        if root.zero == 0 and all(getattr(root, name) == n for name, n in layout.items())
    ]


def test_root_uses_sequence_parallelism_where_it_is_faster_or_all_fits_only_then() -> None:
    layout = {"dp": 1, "tp": 8, "pp": 1}
    options = options_of(REQUEST)
    (plenty,) = (root for root in roots(1 << 40, **layout) if root.family == "hybrid")
    assert plenty.keep is ss.Keep.EVERYTHING
    secs = [options.estimate.of(replace(plenty, sequence=cut)).secs for cut in (True, False)]
    assert plenty.sequence == (secs[0] < secs[1])
    # The smallest microbatch fits with sequence parallelism, and does not fit without it.
    small = replace(plenty, samples=1)
    need = [options.estimate.of(replace(small, sequence=cut)).num_bytes for cut in (True, False)]
    assert need[0] < need[1]
    kept = [r for r in roots(sum(need) / 2, **layout) if r.keep is ss.Keep.EVERYTHING]
    assert [root.sequence for root in kept if root.family == "hybrid"] == [True]


def test_search_begins_with_communication_of_tensor_parallel_hidden() -> None:
    """The trial of a root says what is hidden, and one without ``moves`` what that gains."""
    options = options_of(REQUEST)
    hybrid = [root for root in options.roots() if root.family == "hybrid"]
    assert {root.moves for root in hybrid if root.tp > 1} == {True}
    assert {root.moves for root in hybrid if root.tp == 1} == {False}
    root = next(root for root in hybrid if root.tp > 1)
    assert replace(root, moves=False) in options.moves(root)


@pytest.mark.parametrize("gib", [1, 4, 16])
def test_root_is_estimated_to_fit_if_any_setting_of_its_layout_fits(gib: int) -> None:
    options = options_of(replace(REQUEST, memory_bytes=gib << 30))
    fitting = [r for r in options.roots() if options.estimate.of(r).num_bytes <= gib << 30]
    others = [r for r in options.roots() if r not in fitting]
    assert fitting
    for root in others:
        leaner = replace(root, samples=1, keep=ss.Keep.BLOCK_INPUTS)
        assert options.estimate.of(leaner).num_bytes > gib << 30


@pytest.mark.parametrize("model, has_attention", [("mlp", False), ("gpt", True)])
def test_recomputation_of_attentions_alone_needs_attentions(
    model: str, has_attention: bool
) -> None:
    options = options_of(request(model))
    start = Setting.parse("hybrid tp=2")
    near = {*options.moves(start), *options.savings(start)}
    assert (ss.Keep.ATTENTION_ONLY in {each.keep for each in near}) == has_attention


@pytest.mark.parametrize("tp, coshard", [(1, 1), (1, 4), (2, 2), (2, 4), (3, 1), (4, 1), (4, 2)])
def test_settings_are_allowed_if_heads_and_features_can_be_cut(tp: int, coshard: int) -> None:
    """Six heads can be cut into 1, 2, 3, or 6 parts; a plan with other numbers cannot be filled."""
    sizes = {"sequence": 4, "layers": 2, "width": 12, "heads": 6}
    graph = ss.capture(build("gpt", **sizes), example_inputs("gpt", 1, **sizes))
    asked = replace(request("gpt", tp), graph_of=lambda _: graph, samples=(1,), batch=1)
    setting = Setting(tp=tp, coshard=coshard)
    is_possible = tp * coshard in (1, 2, 3, 6)
    assert options_of(asked).allows(setting) == is_possible
    with nullcontext() if is_possible else pytest.raises(ss.PlanError, match="cannot be cut into"):
        Filling(setting, asked.profile, 0, 1)(ss.Plan(graph, asked.devices))
