"""Stage cuts of a small GPT: prices, plans, training as on one device, and memory limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cli import main
from superscaler_core.cost import PROFILES
from superscaler_core.models import GPT, GPTConfig
from superscaler_core.published.stages import (
    STAGE_PLANNERS,
    Degrees,
    StageCut,
    StageProblem,
    alpa,
    fill,
    plan_stages,
    price_stages,
    stages,
)
from tests.superscaler_core.cases import Case, check_trains

HOSTS = rv.Topology.hosts(
    [range(2), range(2, 4)], intra=rv.Link(5e-6, 100e9), inter=rv.Link(20e-6, 10e9)
)
MICROBATCHES = 4


@cache
def gpt() -> ss.Graph:
    """A model of four layers, with microbatches of eight samples."""
    sizes = GPTConfig(vocabulary=512, sequence=128, layers=4, width=256, heads=8)
    with torch.device("meta"):
        tokens = torch.empty(8, 128, dtype=torch.int64)
        return ss.capture(GPT(sizes), (tokens, tokens))


@cache
def problem(keep: ss.Keep = ss.Keep.EVERYTHING) -> StageProblem:
    costs = ss.CostModel(gpt(), PROFILES["a100"], HOSTS)
    return price_stages(costs, range(4), MICROBATCHES, keep=keep, has_changes=True)


def test_equal_layers_have_equal_costs() -> None:
    inner = problem().layers[1:-1]
    assert len({layer.costs for layer in inner}) == 1
    assert len({layer.costs for layer in problem().layers}) == 3


def test_layers_of_a_gpt_are_a_chain_of_hidden_states() -> None:
    sizes = [layer.out_bytes for layer in problem().layers]
    assert problem().edges == ((0, 1), (1, 2), (2, 3))
    assert sizes == [8 * 128 * 256 * 4] * 3 + [0]


@pytest.mark.parametrize("degrees", ["1x1", "4x1", "1x4", "2x2"])
def test_predicted_time_of_one_stage_is_near_the_simulated_time(degrees: str) -> None:
    chosen = Degrees.parse(degrees)
    cut = problem().placed([(range(4), chosen)], 0.0)
    plan = ss.Plan(gpt(), range(chosen.num_devices))
    fill(plan, cut=cut, microbatches=MICROBATCHES)
    secs = ss.simulate(ss.compile(plan, topology=HOSTS), "a100").secs
    assert problem().step_secs(cut) == pytest.approx(secs, rel=0.05)


@pytest.mark.parametrize("keep", [ss.Keep.EVERYTHING, ss.Keep.BLOCK_INPUTS], ids=str)
def test_predicted_memory_of_stages_is_near_the_compiled_memory(keep: ss.Keep) -> None:
    cut = StageCut.parse("cut 0\nstage 0-1 on 0-1 as 2x1\nstage 2 on 2 as 1x1\nstage 3 on 3 as 1x1")
    plan = ss.Plan(gpt(), range(4))
    fill(plan, cut=cut, microbatches=MICROBATCHES, keep=keep)
    memory = ss.compile(plan, topology=HOSTS).memory
    for index, stage in enumerate(cut.stages):
        read = max(memory[device].total_bytes for device in stage.devices)
        assert problem(keep).stage_bytes(stage, 2 - index) == pytest.approx(read, rel=0.06)


@pytest.mark.parametrize("name", STAGE_PLANNERS)
def test_a_plan_under_a_limit_compiles_under_that_limit(name: str) -> None:
    """The limit is below the need of the unlimited plan, so the planner has to choose another."""
    planner = STAGE_PLANNERS[name]
    free, made = plan_stages(gpt(), problem(), planner, HOSTS)
    limit = int(0.98 * max(memory.total_bytes for memory in made.memory.values()))
    limited = replace(problem(), memory_bytes=limit)
    cut, made = plan_stages(gpt(), limited, planner, HOSTS)
    assert cut.stages != free.stages
    ss.compile(made.plan, topology=HOSTS, memory_limit=limit)


def test_memory_limit_without_a_fitting_cut_raises_plan_error() -> None:
    with pytest.raises(ss.PlanError, match="finds no cut of 4 layers on 4 devices"):
        plan_stages(gpt(), replace(problem(), memory_bytes=1 << 20), alpa, HOSTS)


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CutCase(Case):
    """A GPT whose stages are those of a cut."""

    plan: str = "cut"
    num_devices: int = 4
    cut: str = ""

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(self.num_devices))
        fill(plan, cut=StageCut.parse(self.cut), **self.options)
        return plan


@pytest.mark.parametrize(
    "text",
    [
        "stage 0 on 3 as 1x1\nstage 1-2 on 0-1 as 1x2 2x1\nstage 3 on 2 as 1x1",
        "stage 0-2 on 0-1 as 2x1 2x1 1x2\nstage 3 on 2-3 as 1x2",
        "stage 0-3 on 0-3 as 4x1 2x2 2x2 1x4",
    ],
    ids=["three stages", "two stages", "one stage"],
)
def test_uneven_stages_with_degrees_per_layer_train_as_one_device(
    text: str, tmp_path: Path
) -> None:
    options = {"microbatches": 3, "keep": ss.Keep.BLOCK_INPUTS}
    case = CutCase(options=options, sizes={"layers": 4}, cut=f"cut 0.0\n{text}")
    # Rounding of float64 over two steps.
    check_trains(case, tmp_path, 1e-9)


def test_stage_of_noncontiguous_layers_raises_plan_error() -> None:
    cut = StageCut.parse("cut 1.0\nstage 0,2 on 0 as 1x1\nstage 1,3 on 1 as 1x1")
    with pytest.raises(ss.PlanError, match="a plan's stages are runs of layers"):
        fill(ss.Plan(gpt(), range(2)), cut=cut, microbatches=2)


# --- the sProgram -------------------------------------------------------------------------------


def test_sprogram_makes_the_same_decisions_as_its_planner() -> None:
    plan = ss.Plan(gpt(), range(4))
    planner = STAGE_PLANNERS["piper"]
    stages(
        plan, planner=planner, microbatches=MICROBATCHES, profile=PROFILES["a100"], topology=HOSTS
    )
    _, made = plan_stages(gpt(), problem(), planner, HOSTS)
    assert plan.decisions.parts == made.plan.decisions.parts


def test_devices_that_a_planner_does_not_use_stay_idle() -> None:
    plan = ss.Plan(gpt(), range(4))
    stages(plan, planner=on_one, microbatches=2, profile=PROFILES["a100"], topology=HOSTS)
    program = ss.compile(plan, topology=HOSTS)
    used = [memory.weights_bytes > 0 for memory in program.memory.values()]
    assert used == [True, False, False, False]
    assert ss.simulate(program, "a100").secs > 0


def on_one(problem: StageProblem) -> StageCut:
    return problem.placed([(range(len(problem.layers)), Degrees(1, 1))], 0.0)


def test_command_line_selects_the_planner_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan gpt stages --devices 2 --set layers=3 --set microbatches=2 --summary --set"
    assert main([*words.split(), "planner=piper"]) == 0
    assert "on 2 devices, 2 stages, 2 microbatches" in capsys.readouterr().out
    assert main([*words.split(), "planner=metis"]) == 2
    assert "expected one of pipedream" in capsys.readouterr().err
