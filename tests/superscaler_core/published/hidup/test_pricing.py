"""Forms of captured models: prices, found strategies, and plans that train as one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core import Op
from superscaler_core.cost import PROFILES, CostModel
from superscaler_core.errors import PlanError
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import OpSplit
from superscaler_core.published.hidup import (
    BEAM,
    FormStrategy,
    OurPrices,
    Prediction,
    PricedForms,
    PublishedPrices,
    hidup,
    propose_hidup,
)
from tests.superscaler_core.cases import Case, check_trains

FAST = rv.Link(1e-9, 1e12)


def forms_of(graph: ss.Graph, num: int, link: rv.Link = FAST) -> PricedForms:
    """The forms of a model on equal devices of one host."""
    topology = rv.Topology.single_host(num, link.alpha_secs, link.bytes_per_sec)
    return PricedForms(OurPrices(CostModel(graph, PROFILES["v100"], topology)), tuple(range(num)))


def found(forms: PricedForms) -> FormStrategy:
    return hidup(forms.problem, most_calls=None, beam=BEAM)


@dataclass(frozen=True)
class Duplexed(Case):
    """A model trained by the strategy that HiDup finds for it."""

    plan: str = "hidup"
    num_devices: int = 2
    model: str = "moe_encoder"

    def planned(self) -> ss.Plan:
        forms = forms_of(self._graph(), self.num_devices)
        plan = ss.Plan(self._graph(), range(self.num_devices))
        forms.fill(plan, found(forms))
        assert plan.overlap.duplex
        return plan


CASES = [
    Duplexed(sizes={"preset": f"tiny-{model}-{gate}"}, num_devices=num)
    for model, gate, num in [("bert", "sgmoe", 4), ("vit", "switch", 2)]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategies_train_as_one_device_does(case: Duplexed, tmp_path: Path) -> None:
    # Sums are in another order; the tolerance is that of test_plans.
    check_trains(case, tmp_path, 1e-11)


@pytest.fixture(scope="module")
def encoder() -> ss.Graph:
    """Two layers of BERT with SGMoE at the published width, with half of the batch of 8 devices."""
    sizes = {"preset": "bert-sgmoe", "layers": 2, "experts": 16}
    with torch.device("meta"):
        model = build("moe_encoder", **sizes)
    return ss.capture(model, example_inputs("moe_encoder", 128, **sizes))


def chosen(forms: PricedForms, strategy: FormStrategy) -> Mapping[str, str]:
    """The signature of every call, by name."""
    pairs = zip(forms.problem.calls, strategy.signatures, strict=True)
    return {call.name: call.signatures[number].name for call, number in pairs}


def test_experts_are_distributed_and_other_ops_are_cut_by_batch(encoder: ss.Graph) -> None:
    forms = forms_of(encoder, 8, rv.Link(5e-6, 20e9))
    strategy = found(forms)
    names = chosen(forms, strategy)
    for call in ("layers.1.moe.experts:einsum", "layers.1.moe.experts:einsum_2"):
        assert names[call] == "e/8"
    for call in ("layers.0.attn.q:linear", "layers.0.mlp.up:linear", "layers.1.moe.gate:linear"):
        assert names[call].startswith("b/8")
    text = forms.text(strategy)
    assert "layers.1.moe.einsum Gather(1) -> Gather(0)" in text
    assert "layers.1.moe.experts:einsum: e/8" in text


def test_slower_links_increase_the_predicted_wall_time(encoder: ss.Graph) -> None:
    walls = []
    for rate in (100e9, 1e9):
        forms = forms_of(encoder, 4, rv.Link(5e-6, rate))
        strategy = found(forms)
        predicted = Prediction.of([stage.work for stage in strategy.stages])
        assert predicted.wall_secs == strategy.secs
        assert predicted.computing_secs <= predicted.wall_secs <= predicted.total_secs
        assert 0 < predicted.overlap <= 1
        walls.append(predicted.wall_secs)
    assert walls[0] < walls[1]


def op_of(graph: ss.Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.name == name)


def test_published_prices_equal_their_formulas(encoder: ss.Graph) -> None:
    prices = PublishedPrices(encoder)
    up = op_of(encoder, "layers.0.mlp.up:linear")
    by_batch = OpSplit.grid(up.sizes, range(8), [("b", 8)])
    whole = OpSplit.grid(up.sizes, range(8), [(None, 8)])
    secs = 3 * 128 * 128 * 768 * 3072 / 4.139e12
    assert prices.computing(up, whole) == pytest.approx((0, secs, 0, 2 * secs))
    assert prices.computing(up, by_batch) == pytest.approx((0, secs / 8, 0, secs / 4))
    weight_bytes = 4 * 768 * 3072
    reduced = prices.weight((up, 1), by_batch, None)
    assert reduced == pytest.approx((0, 0, weight_bytes / 6.117e8 + 1e-4, 0))
    stored = OpSplit.grid({"d0": 3072, "d1": 768}, range(8), [("d0", 8)])
    gathered = weight_bytes / 1.2246e9 + 1e-4, 0, weight_bytes / 1.1302e9 + 1e-4, 0
    assert prices.weight((up, 1), by_batch, stored) == pytest.approx(gathered)
    assert prices.weight((up, 1), whole, None) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward"),
    [
        ("n", "b", 1.0701e10, 1.0701e10),  # all-to-all
        ("n", None, 1.2246e9, 1.1302e9),  # all-gather; reduce-scatter
        ("k", "b", 1.1302e9, 1.2246e9),  # reduce-scatter; all-gather
        ("k", None, 6.117e8, 6.117e8),  # all-reduce
        (None, "b", None, None),  # a slice
    ],
)
def test_published_price_of_a_reform_is_that_of_one_collective(
    encoder: ss.Graph,
    src: str | None,
    dst: str | None,
    forward: float | None,
    backward: float | None,
) -> None:
    prices = PublishedPrices(encoder)
    line, bias = (op_of(encoder, f"layers.0.mlp.up:{kind}") for kind in ("linear", "add_bias"))
    ends = (OpSplit.grid(op.sizes, range(8), [(cut, 8)]) for op, cut in ((line, src), (bias, dst)))
    num_bytes = 4 * 128 * 128 * 3072
    secs = [num_bytes / rate + 1e-4 if rate else 0 for rate in (forward, backward)]
    assert prices.moving(line.outputs[0], *ends, (bias, 0)) == pytest.approx(
        (secs[0], 0, secs[1], 0)
    )


def test_strategy_rejects_a_plan_of_another_graph(encoder: ss.Graph) -> None:
    forms = forms_of(encoder, 2)
    other = Duplexed(sizes={"preset": "tiny-bert-sgmoe"}).planned()
    with pytest.raises(PlanError, match="the plan is of another graph"):
        forms.fill(other, found(forms))


def test_search_with_hidup_finds_a_duplex_plan() -> None:
    preset = "tiny-bert-switch"
    found = ss.search(
        build("moe_encoder", preset),
        example_inputs("moe_encoder", 8, preset),
        topology=rv.Topology.single_host(2, 5e-6, 20e9),
        batch=8,
        samples=[4],
        memory_bytes=1 << 30,
        planner=propose_hidup,
    )
    assert found.plan.overlap.duplex
    assert found.plan.num_microbatches == 2
