"""Laws of guessed communication: its time is near the time of rvdcomm's plans."""

from __future__ import annotations

from itertools import product

import pytest

import rvdcomm as rv
from superscaler_core.planners.auto.sending import Sending
from superscaler_core.planners.auto.traits import Traits
from tests.superscaler_core.planners.search.test_search import graph

NUM, NUM_ELEMENTS = 16, 1 << 24
HOSTS = rv.Topology.hosts(
    [range(8), range(8, 16)], intra=rv.Link(5e-6, 120e9), inter=rv.Link(15e-6, 11e9)
)
SENDING = Sending(Traits(graph("mlp", 1)), HOSTS)

GROUPS = [(n, s) for n, s in product((2, 4, 8, 16), (1, 2, 4, 8)) if n * s <= NUM]
"""Sizes and strides."""

SHARE = 0.07
"""Relative tolerance: guesses do not count single rounds, and plans may have fewer steps."""


def groups(size: int, stride: int) -> list[list[int]]:
    """All groups of ``size`` ranks with the distance ``stride``."""
    starts = [o + i for o in range(0, NUM, size * stride) for i in range(stride)]
    return [[start + j * stride for j in range(size)] for start in starts]


def planned_secs(shape: tuple[int, ...], src: str, dst: str, ranks: list[int]) -> float:
    layouts = (rv.Layout(shape, each, ranks=ranks) for each in (src, dst))
    return rv.plan(*layouts, "float32", HOSTS).cost.secs


@pytest.mark.parametrize(("size", "stride"), GROUPS)
def test_guessed_all_reduce_time_is_near_the_time_of_its_plan(size: int, stride: int) -> None:
    all_groups = groups(size, stride)
    num = len(all_groups)
    ranks = [each[place] for place in range(size) for each in all_groups]
    planned = planned_secs(
        (num * NUM_ELEMENTS,), f"R(1)V({size})D({num})", f"R({size})V(1)D({num})", ranks
    )
    found = SENDING.all_reduce_secs(4 * NUM_ELEMENTS, size, stride)
    assert found == pytest.approx(planned, rel=SHARE)


@pytest.mark.parametrize(("size", "stride"), GROUPS)
def test_guessed_all_to_all_time_is_near_the_time_of_its_plan(size: int, stride: int) -> None:
    all_groups = groups(size, stride)
    num = len(all_groups)
    ranks = [rank for each in all_groups for rank in each]
    planned = planned_secs(
        (num * NUM_ELEMENTS, size),
        f"R(1)V(1)D({num},{size})",
        f"R(1)V(1)D({num * size},1)",
        ranks,
    )
    found = SENDING.all_to_all_secs(4 * NUM_ELEMENTS, size, stride)
    assert found == pytest.approx(planned, rel=SHARE)


def test_block_has_two_all_reduces_in_each_direction() -> None:
    """The second maps of attention and of the MLP are reduced, as in Megatron-LM."""
    traits = Traits(graph("gpt", 1))
    stream_bytes = traits.blocks.layers[0][-1].outputs[0].num_bytes
    times, num_bytes = Sending(traits, HOSTS).summed
    assert times == 2 * 2 * traits.num_layers
    assert num_bytes == times * stream_bytes


def test_only_models_with_experts_dispatch_tokens() -> None:
    dealt = {name: Sending(Traits(graph(name, 1)), HOSTS).dealt_bytes for name in ("gpt", "moe")}
    assert dealt["gpt"] == 0
    assert dealt["moe"] > 0
