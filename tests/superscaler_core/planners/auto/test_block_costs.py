"""Laws of block costs: a chain of costs is one cost, equal blocks are alike, parts cost less."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from superscaler_core.cost import MemoryCost, peak_bytes
from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.block_costs import BlockCosts
from superscaler_core.planners.auto.model_cost import as_one
from tests.superscaler_core.planners.auto.test_estimate import REQUEST, masked


def chain(random: Random, num: int) -> list[MemoryCost]:
    """Costs of an op whose peaks are at least what it keeps, as those of every op."""
    found = []
    for _ in range(num):
        weights, grads, states, kept, read = (random.randint(0, 90) for _ in range(5))
        forward, backward = (kept + random.randint(0, 90) for _ in range(2))
        first = backward + random.randint(0, grads)
        found.append(MemoryCost(weights, grads, states, kept, read, forward, backward, first))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_peak_of_a_chain_is_that_of_its_blocks(seed: int) -> None:
    random = Random(seed)
    blocks = [chain(random, random.randint(1, 4)) for _ in range(random.randint(1, 4))]
    whole = [cost for block in blocks for cost in block]
    parts = [as_one(block) for block in blocks]
    for microbatches in (1, 2, 5):
        for in_flight in (1, 2):
            counts = {"microbatches": microbatches, "in_flight": in_flight}
            assert peak_bytes(parts, **counts) == peak_bytes(whole, **counts)


def test_stages_have_all_blocks_and_the_ops_around_them() -> None:
    cost = BlockCosts(REQUEST).of(Setting())
    rows = cost.stages((3, 5))
    assert [len(row) for row in rows] == [1 + 3, 5 + 1]
    assert len({*cost.layers}) == 1


def test_tensor_parallelism_cuts_weights_and_work_and_adds_communication() -> None:
    costs = BlockCosts(REQUEST)
    alone, both = (costs.of(Setting(tp=tp)).layers[0] for tp in (1, 2))
    assert both.forward_secs < alone.forward_secs
    assert both.memory.kept_bytes < alone.memory.kept_bytes
    # The first sum is behind attention in the forward, and before the MLP in the backward.
    assert alone.alone_shares == pytest.approx((1, 1))
    forward, backward = both.alone_shares
    assert 0 < forward < backward < 1
    assert alone.sent_secs == 0 < both.sent_secs


@pytest.mark.parametrize(
    "fewer, more", [("everything", "attention_only"), ("attention_only", "block_inputs")]
)
def test_what_keeps_less_recomputes_more(fewer: str, more: str) -> None:
    costs = BlockCosts(REQUEST)
    a, b = (costs.of(Setting.parse(f"hybrid keep={keep}")).layers[0] for keep in (fewer, more))
    assert a.memory.kept_bytes > b.memory.kept_bytes
    assert a.again_secs < b.again_secs


def test_block_that_keeps_only_its_input_recomputes_its_forward() -> None:
    block = BlockCosts(REQUEST).of(Setting.parse("hybrid keep=block_inputs")).layers[0]
    assert block.again_secs == pytest.approx(block.forward_secs)
    assert block.memory.kept_bytes == 512 * 1024 * 4


def test_op_without_a_gradient_does_not_divide_what_is_recomputed_around_it() -> None:
    costs = BlockCosts(replace(REQUEST, graph_of=masked))
    for parts in (1, 2):
        block = costs.of(Setting.parse(f"hybrid keep=block_inputs coshard={parts}")).layers[0]
        assert block.memory.kept_bytes == 512 * 1024 * 4


def test_interpolated_costs_are_exact_at_both_ends_and_near_between() -> None:
    costs = BlockCosts(REQUEST)
    for samples in (1, 8):
        setting = Setting(tp=2, samples=samples)
        assert costs.near(setting) is costs.of(setting)
    near, exact = (find(Setting(tp=2, samples=4)).layers[0] for find in (costs.near, costs.of))
    assert near.memory.kept_bytes == exact.memory.kept_bytes
    # Speeds grow with the work.
    assert near.forward_secs == pytest.approx(exact.forward_secs, rel=0.05)


def test_results_of_a_block_are_read_by_the_next_one() -> None:
    (output,) = BlockCosts(REQUEST).of(Setting(tp=2, sequence=True)).layers[0].outputs
    assert output.shape == (1, 512, 1024)
    assert len(output.src.shards) == len(output.dst.shards) == 2
