"""GSPMD plans train as one device, and errors name invalid options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.parallel import SProgram
from superscaler_core.published.gspmd import Propagated
from superscaler_core.published.gspmd.price import cut_text
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.packed import LENGTH, Model, Packed, flash
from tests.superscaler_core.published.gspmd.programs import Experts, completed

MEGATRON = "tokens:d0@x;*.attn.q.weight:d0@y;*.mlp.up.weight:d0@y"


@dataclass(frozen=True)
class Specs(Case):
    """A model with the specs in ``plan``."""

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(self.num_devices))
        SProgram.of(self.plan)(plan, 1)
        return plan


@dataclass(frozen=True)
class Marks(Specs):
    """GShard's layer of experts, with sharding marks in its code."""

    plan: str = "gspmd"
    num_devices: int = 4
    model: str = "experts"

    def new_model(self) -> nn.Module:
        torch.manual_seed(0)
        return Experts().double()

    def inputs(self, seed: int, num_microbatches: int = 1) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(4 * num_microbatches, 6, 6, generator=generator).double(),)

    @property
    def recycled(self) -> Mapping[str, int]:
        return {}

    def _graph(self) -> ss.Graph:
        return ss.capture(self.new_model(), self.inputs(0))


CASES = [
    Specs("gspmd:mesh=x:2,y:2,specs=x:d0@x;layers.*.weight:d0@y,d1@x", 4, model="mlp",
          optimizer="adamw"),
    Specs("gspmd:mesh=x:3,specs=layers.*.weight:d0@x", 3, model="mlp"),
    Specs(f"gspmd:mesh=x:2,y:2,specs={MEGATRON}", 4, sizes={"tied": True}),
    Specs("gspmd:mesh=x:2,y:2,specs=embed:embedding:d0@x,d2@y;*.up.weight:d0@y,d1@x;"
          "*.down.weight:d0@x,d1@y;*.attn.?.weight:d0@y,d1@x;embed.weight:d0@y*x", 4),
    Specs("gspmd:mesh=x:4,specs=tokens:d0@x;*.experts.up:d0@x", 4, model="moe"),
    Specs("gspmd:mesh=x:2,y:2,specs=images:d0@x,d2@y", 4, model="wide_resnet", num_steps=1),
    Marks(),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_with_specs_train_as_one_device(case: Specs, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


def test_specs_by_name_equal_or_replace_marks_in_the_model(tmp_path: Path) -> None:
    """Specs by name replace the marks. Equal specs give the same plan; other specs give another."""
    graph = Marks()._graph()
    plans = []
    for text in ("gspmd", "gspmd:specs=wg:*@-;einsum_2:d0@x;matmul:d0@x", "gspmd:specs=wg:d1@x"):
        plans.append(ss.Plan(graph, range(4)))
        SProgram.of(text)(plans[-1], 1)
    first, same, other = (plan.decisions for plan in plans)
    assert first == same != other


def test_parameter_is_stored_in_the_shards_of_its_spec() -> None:
    plan = Specs("gspmd:mesh=x:2,y:2,specs=tokens:d0@x*y;head.weight:d1@y", 4).planned()
    stored = plan.op_split(plan.update("head.weight"))
    assert str(stored) == ("0 d1[0:8]; 1 d1[8:16]; 2 d1[0:8] copy:1; 3 d1[8:16] copy:1")
    assert not plan.has_parts(plan.update("norm.weight"))


class OneMap(Packed):
    """Attention with one packed map of queries, keys and values, whose weight has a mark."""

    def forward(self, x: Tensor) -> Tensor:
        ss.shard(self.packed.weight, "d0@x")
        return super().forward(x)


def test_a_packed_parameter_takes_specs_in_the_dims_of_the_model() -> None:
    """Dim 0 of a packed map of queries, keys and values is cut by heads, in each of the three."""

    def found(attention: type[Packed], specs: Mapping[str, str]) -> Propagated:
        model = Model(lambda: attention("split", flash, nn.Linear), nn.Linear)
        tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
        return completed(ss.capture(model, (tokens, tokens)), "x:4", specs)

    named, marked = found(Packed, {"*.mixer.packed.weight": "d0@x"}), found(OneMap, {})
    for each in (named, marked):
        cuts = {op.name: cut_text(cut) for op, cut in each.cuts.items() if op.kind == "attention"}
        assert set(cuts.values()) == {"h@x"}
        assert str(each.spec("blocks.0.mixer.packed.weight")) == "d1@x, *@-"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gspmd:mesh=x:3", "mesh x:3 has 3 devices, and 4 were given"),
        ("gspmd:mesh=3", "expected NAME:DEVICES with commas between, such as x:2,y:4"),
        ("gspmd:specs=tokens", "expected NAME:SPEC with semicolons between"),
        ("gspmd:specs=tokens:d0@y", "mesh x:4 has no axis y"),
        ("gspmd:specs=*.mpl.*:d0@x", r"GPT has no tensor or op '\*.mpl.\*'; it has layers"),
    ],
)
def test_invalid_options_raise_plan_error(text: str, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        Specs(text, 4).planned()
