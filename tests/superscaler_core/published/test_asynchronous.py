"""Asynchronous pipelines train as a plain loop with the same delayed gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import superscaler_core as ss
from superscaler_core.published.asynchronous import PipeMare
from superscaler_core.schedules import Action, ActionKind, on_one_worker
from tests.superscaler_core.cases import (
    OPTIMIZERS,
    Case,
    Trained,
    difference,
    train,
    train_alone,
)
from tests.superscaler_core.delayed import (
    Delays,
    TiedMLP,
    Weights,
    delayed,
    mlp_loss,
    train_asynchronously,
    train_delayed,
)
from tests.superscaler_core.small import on_one

TOLERANCE, FLOOR = 1e-12, 1e-3
GRID = {"microbatches": 10, "pp": 2}
GPT = {"layers": 2}
TIED = {**GPT, "tied": True}
MLP: dict[str, Any] = {
    "model": "mlp", "sizes": {"layers": 4, "inputs": 12, "outputs": 12}
}  # fmt: skip
WIDE: dict[str, Any] = {
    "sizes": {"layers": 4, "inputs": 12, "hidden": 12, "outputs": 12}
}  # fmt: skip
STASHING = [
    Case("pipedream", 2, {"microbatches": 10}, sizes=GPT, rewrite="apart"),
    Case("pipedream_2bw", 4, {**GRID, "microbatches": 15, "every": 3}, sizes=GPT, num_steps=4),
    Case("pipedream", 2, {"microbatches": 10}, sizes=TIED),
    Case("pipedream", 2, {"microbatches": 10, "vertical": True}, sizes=TIED),
    Case("pipedream", 3, {"microbatches": 12, "every": 3}, sizes={**TIED, "layers": 3}, batch=1),
    Case("pipedream", 4, {**GRID, "tp": 2}, sizes=TIED),
    Case("pipedream", 4, {**GRID, "zero": 1}, sizes=TIED, optimizer="adamw"),
    Case("pipedream", 2, {"microbatches": 10}, sizes=TIED, rewrite="halves"),
    Case("pipedream_2bw", 3, {"microbatches": 30}, sizes={**TIED, "layers": 3}),
]
TIED_CASES = [case for case in STASHING if "tied" in case.sizes]
NEWEST = [
    Case("ampnet", 2, {"microbatches": 10}, **MLP, rewrite="halves"),
    Case("pipemare", 4, {"microbatches": 40, "every": 4}, **MLP),
    TiedMLP("ampnet", 4, {"microbatches": 10}, **WIDE),
    TiedMLP("ampnet", 4, {**GRID, "zero": 1}, **WIDE, optimizer="adamw"),
    TiedMLP("pipemare", 4, {"microbatches": 20, "every": 2}, **WIDE),
]


def on_threads(case: Case, folder: Path, *given: Any) -> tuple[ss.Compiled, list[Trained]]:
    """What each rank of the program trains on a thread."""
    compiled = case.compiled()
    compiled.save(folder)
    state, ranks = case.new_model().state_dict(), range(case.num_devices)
    found = ss.run_threads(folder, lambda t: train_asynchronously(t, case, state, *given), ranks)
    return compiled, list(found.values())


def off(found: list[Trained], alone: Trained) -> list[float]:
    """The differences that are too large."""
    errors = [difference(one, alone, FLOOR) for one in found]
    return [error for error in errors if not error <= TOLERANCE]


@pytest.mark.parametrize("case", [*STASHING, *NEWEST], ids=str)
def test_asynchronous_updates_equal_those_of_a_loop_with_the_same_delays(
    case: Case, tmp_path: Path
) -> None:
    compiled, found = on_threads(case, tmp_path)
    assert off(found, delayed(case, compiled.plan)) == []
    assert len(off(found, train_alone(case, case.options["microbatches"]))) == case.num_devices


# --- PipeMare: formulas from memory, not checked against the paper -----------------------------

MARE = Case("pipemare", 4, {"microbatches": 20, "every": 2}, **MLP)
TIED_MARE = TiedMLP("pipemare", 4, {"microbatches": 20, "every": 2}, **WIDE)
DECAY, ANNEALING = float(np.exp(-2)), 15


@pytest.mark.parametrize("mare", [MARE, TIED_MARE], ids=str)
def test_pipemare_rescales_learning_rates_and_corrects_the_weights_of_backwards(
    mare: Case, tmp_path: Path
) -> None:
    compiled, found = on_threads(mare, tmp_path, PipeMare(annealing=ANNEALING, decay=DECAY))
    taus = [(2 * (4 - stage) + 1) / 2 for stage in (1, 2, 3, 4)]

    def corrected(stage: int, version: int, versions: list[Weights]) -> Weights:
        gamma = DECAY ** (1 / taus[stage])
        delta = {name: torch.zeros_like(x) for name, x in versions[0].items()}
        for before, after in pairwise(versions[: version + 1]):
            delta = {
                name: gamma * delta[name] + (1 - gamma) * (after[name] - before[name])
                for name in delta
            }
        return {name: x - taus[stage] * delta[name] for name, x in versions[version].items()}

    def rate(stage: int, update: int) -> float:
        # tau of the last stage is 1/2: its learning rate is never raised.
        return float(max(taus[stage], 1.0) ** -(1 - min(update / ANNEALING, 1)))

    alone = train_delayed(mare, compiled.plan, mlp_loss, corrected=corrected, rate=rate)
    assert off(found, alone) == []
    uncorrected = train_delayed(mare, compiled.plan, mlp_loss, rate=rate)
    assert len(off(found, uncorrected)) == 4


def test_asynchronous_training_resumes_after_a_synchronous_warm_up(tmp_path: Path) -> None:
    """T3: another program trains the first steps, and its checkpoint is loaded."""
    warm = Case("one_f_one_b", 4, {"microbatches": 4}, **MLP, optimizer="plain")
    mare = Case("pipemare", 4, MARE.options, **MLP, optimizer="plain")
    warm.compiled().save(tmp_path / "warm")
    compiled, state = mare.compiled(), warm.new_model().state_dict()
    compiled.save(tmp_path / "mare")

    def first(trainer: ss.Trainer) -> None:
        train(trainer, warm, state)
        trainer.save(tmp_path / "saved")

    def then(trainer: ss.Trainer) -> Trained:
        trainer.load(tmp_path / "saved")
        return train_asynchronously(trainer, mare, trainer.state_dict())

    ss.run_threads(tmp_path / "warm", first, range(4))
    found = ss.run_threads(tmp_path / "mare", then, range(4))
    start = train_alone(warm, 4).parameters
    alone = train_delayed(mare, compiled.plan, mlp_loss, start=start)
    assert off(list(found.values()), alone) == []


# --- parameters and memory ----------------------------------------------------------------------


def test_steps_keep_the_memory_addresses_of_parameters(tmp_path: Path) -> None:
    """Another program of the rank shares them, and so it reads the newest version."""
    case = Case("pipedream", 2, {"microbatches": 4}, sizes=GPT)
    case.compiled().save(tmp_path)
    state = case.new_model().state_dict()

    def places(trainer: ss.Trainer) -> list[int]:
        return [parameter.data_ptr() for parameter in trainer.parameters()]

    def work(trainer: ss.Trainer) -> bool:
        before = places(trainer)
        train_asynchronously(trainer, case, state)
        return places(trainer) == before

    assert all(ss.run_threads(tmp_path, work, range(2)).values())


def test_memory_estimate_counts_every_version_of_the_weights() -> None:
    """The weights of a stage take one version times the versions that the schedule keeps."""
    single, stash, two = (
        Case(name, 4, {"microbatches": 8}, sizes={"layers": 4}).compiled().memory
        for name in ("ampnet", "pipedream", "pipedream_2bw")
    )
    for device, kept in enumerate((4, 3, 2, 1)):
        weights = single[device].weights_bytes
        assert stash[device].weights_bytes == kept * weights
        assert two[device].weights_bytes == 2 * weights


# --- errors -------------------------------------------------------------------------------------


def refused(case: Case, change: Callable[[ss.Plan], object]) -> str:
    plan = case.planned()
    change(plan)
    with pytest.raises(ss.PlanError) as caught:
        ss.compile(plan)
    return str(caught.value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda plan: plan.unshard(plan.blocks.layers[0]), "an FSDP unit"),
        (lambda plan: plan.reduce_grads(plan.blocks.layers[0]), "an FSDP unit"),
        (lambda plan: plan.store_on_host("head.weight"), "stored on the host have one version"),
        (lambda plan: setattr(plan, "overlap", ss.Overlap(reductions=True)), "do not overlap"),
    ],
)
def test_decisions_that_need_one_version_are_refused(
    change: Callable[[ss.Plan], object], words: str
) -> None:
    assert words in refused(Case("pipedream", 2, {"microbatches": 4}, sizes=GPT), change)


# --- weights that stages share ------------------------------------------------------------------


@pytest.mark.parametrize("case", TIED_CASES, ids=str)
def test_program_records_which_version_of_a_shared_weight_is_read(case: Case) -> None:
    """For a microbatch the last stage reads the same version as the first stage."""
    compiled = case.compiled()
    program, schedule = compiled.step_program, compiled.plan.schedule
    assert schedule is not None
    last = schedule.num_stages - 1
    of_first = {a: v for a, v in schedule.versions.items() if a.stage == 0 and a.kind in "FBIW"}
    assert program.borrowed == {(replace(a, stage=last), 0): v for a, v in of_first.items()}
    assert ss.StepProgram.parse(str(program)) == program
    program.check()


@pytest.mark.parametrize("case", [TIED_CASES[0], NEWEST[-1]], ids=str)
def test_one_device_trains_shared_weights_with_the_same_delays(case: Case, tmp_path: Path) -> None:
    plan = case.planned()
    assert plan.schedule is not None
    alone = on_one(ss.Plan(plan.graph, [0]))
    alone.pipeline([stage.ops[0] for stage in plan.stages[1:]])
    alone.op_order(on_one_worker(plan.schedule))
    ss.compile(alone).save(tmp_path)
    state = case.new_model().state_dict()
    found = ss.run_threads(tmp_path, lambda t: train_asynchronously(t, case, state), range(1))
    assert off(list(found.values()), delayed(case, plan)) == []


def with_later_version(program: ss.StepProgram, kind: str, num: int) -> ss.StepProgram:
    key = Action(ActionKind(kind), 1, 5), 0
    return replace(program, borrowed={**program.borrowed, key: program.borrowed[key] + num})


def update_of_owner_first(program: ss.StepProgram) -> ss.StepProgram:
    update = Action(ActionKind.UPDATE, 1, 9)
    others = tuple(event for event in program.events if event != update)
    return replace(program, events=(*others, update))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda program: with_later_version(program, "F", 2), "reads version 6 .* there is 4, 5"),
        (lambda program: with_later_version(program, "B", 1), "its forward has read version 4"),
        (update_of_owner_first, "hands its gradients over later"),
    ],
)
def test_program_with_wrong_versions_of_a_shared_weight_raises_plan_error(
    damage: Callable[[ss.StepProgram], ss.StepProgram], words: str
) -> None:
    program = TIED_CASES[0].compiled().step_program
    with pytest.raises(ss.PlanError, match=words):
        damage(program).check()


def test_memory_counts_a_shared_weight_on_both_stages_with_the_versions_of_the_first() -> None:
    case = Case("pipedream", 3, {"microbatches": 8}, sizes={**TIED, "layers": 3})
    apart = replace(case, sizes={**case.sizes, "tied": False})
    shared, own = (c.compiled().memory for c in (case, apart))
    embed = case.new_model().get_parameter("embed.weight")
    more = [shared[device].weights_bytes - own[device].weights_bytes for device in range(3)]
    assert more == [0, 0, (3 - 1) * embed.numel() * embed.element_size()]


def step_without_optimizers(trainer: ss.Trainer, case: Case) -> None:
    trainer.step(*case.inputs(0, trainer.num_microbatches))


@pytest.mark.parametrize(
    "plan, work, words",
    [
        ("pipedream", step_without_optimizers, "tell it by update_with"),
        ("pipedream", lambda t, _: t.clip_grad_norm_(1.0), "update at different times"),
        ("pipedream", lambda t, _: t.grad_scaler(), "cannot skip an update"),
        ("pipedream",
         lambda t, _: t.update_with(OPTIMIZERS["sgd"], correction=PipeMare(decay=0.1)),
         "no difference to correct"),
        ("one_f_one_b",
         lambda t, _: t.update_with(OPTIMIZERS["sgd"], correction=PipeMare(annealing=1)),
         "updates after a step, without delay"),
    ],
)  # fmt: skip
def test_unsupported_calls_of_the_trainer_raise_plan_error(
    plan: str, work: Callable[[ss.Trainer, Case], object], words: str, tmp_path: Path
) -> None:
    case = Case(plan, 2, {"microbatches": 4}, sizes=GPT)
    case.compiled().save(tmp_path)
    state = case.new_model().state_dict()

    def refusing(trainer: ss.Trainer) -> None:
        trainer.load_state_dict(state)
        with pytest.raises(ss.PlanError, match=words):
            work(trainer, case)

    ss.run_threads(tmp_path, refusing, range(2))


@pytest.mark.parametrize("options", [{"annealing": -1}, {"decay": 1.0}, {"first": -1}])
def test_pipemare_options_out_of_range_raise_value_error(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 <= decay < 1"):
        PipeMare(**options)  # type: ignore[arg-type]


def test_delays_of_the_reference_loop_equal_those_of_the_schedule() -> None:
    """The closed forms of the loop agree with the versions of the schedules."""
    for case in (*STASHING, *NEWEST, MARE):
        schedule = case.planned().schedule
        assert schedule is not None
        delays = Delays.of(case, schedule.num_stages)
        for action, version in schedule.versions.items():
            if action.kind in "FBIW":
                at = delays.forward if action.kind == "F" else delays.backward
                assert version == at(action.stage, action.microbatch)
