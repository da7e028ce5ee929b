"""Lowering: equal stages have equal effects, and their memory is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

import superscaler_core as ss
from superscaler_core.known import Known
from superscaler_core.memory import footprint
from superscaler_core.memory.effects import StageEffects
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.footprint import Footprint, footprints
from superscaler_core.memory.lowering import Lowering
from superscaler_core.memory.outline import outline
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.models import GPT, GPTConfig
from superscaler_core.plans import PLANS, fill
from tests.superscaler_core.cases import Case


def gpt(layers: int) -> ss.Graph:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=40, sequence=8, layers=layers, width=16, heads=4))
        tokens = torch.empty(4, 8, dtype=torch.int64)
    return ss.capture(model, (tokens, tokens))


def compiled(name: str, num: int = 4, layers: int = 4, **options: Any) -> ss.Compiled:
    plan = ss.Plan(gpt(layers), range(num))
    fill(plan, PLANS[name], options)
    return ss.compile(plan, precision=ss.Precision("float64"))


CASES: dict[str, Callable[[], ss.Compiled]] = {
    "recomputed": lambda: compiled("hybrid", pp=4, keep=ss.Keep.SEGMENT_INPUTS),
    "rerun": lambda: compiled("hybrid", pp=2, tp=2, keep=ss.Keep.BLOCK_INPUTS),
    "grid": lambda: compiled("hybrid", pp=2, tp=2, sequence=True, zero=1),
    "zero3": lambda: compiled("zero3"),
    "swap": lambda: compiled("swap"),
}


def lowering_of(program: ss.Compiled, stage: int, device: int) -> Lowering:
    made = program.materialized
    return Lowering(made, stage, [device], StoredMemory(made, program.precision))


def effects_of(program: ss.Compiled, stage: int, device: int) -> StageEffects:
    return lowering_of(program, stage, device).effects()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_KNOWN", Known(footprint.MAX_STAGES))
    monkeypatch.setattr(footprint, "_OUTLINES", Known(footprint.MAX_STAGES))
    monkeypatch.setattr(footprint, "_FOUND", WeakKeyDictionary())


def all_footprints(program: ss.Compiled, devices: Sequence[int]) -> Mapping[Any, Footprint]:
    return {
        (device, *run): found
        for device in devices
        for run, found in footprints(program.materialized, device, program.precision).items()
    }


# --- effects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_after_a_forward_and_its_backward_but_what_is_outside(name: str) -> None:
    program = CASES[name]()
    for device, stage in [
        (d, s) for s, p in enumerate(program.materialized.stages) for d in p.steps
    ]:
        lowering = lowering_of(program, stage, device)
        effects = lowering.effects()
        fold = Fold(effects, lowering.function)
        for _, run in effects.runs:
            fold.run(run)
            assert fold.values.keys() == dict(effects.outside).keys()
        assert (fold.account.now_bytes, fold.host.now_bytes) == (0, 0)


def test_stages_of_equal_layers_have_equal_effects() -> None:
    program = compiled("hybrid", pp=4)
    first, second, third, last = (effects_of(program, stage, stage) for stage in range(4))
    assert second == third
    # Stage 0 has the embedding and stage 3 has the loss.
    assert len({first, second, last}) == 3


# --- outlines -----------------------------------------------------------------------------------


def outlines_of(program: ss.Compiled) -> Iterator[tuple[Hashable, StageEffects]]:
    """The outline and the effects of every stage on every device."""
    made = program.materialized
    stored = StoredMemory(made, program.precision)
    for stage, steps in enumerate(made.stages):
        for device in steps.steps:
            yield outline(made, stage, [device], stored), effects_of(program, stage, device)


@pytest.mark.parametrize("name", CASES)
def test_plans_that_are_made_twice_have_equal_outlines(name: str) -> None:
    first, second = (list(outlines_of(CASES[name]())) for _ in range(2))
    assert first == second
    assert len({key for key, _ in first}) == len(first)


def test_equal_outlines_have_equal_effects() -> None:
    """Options that change what a stage does change its outline."""
    variants = [
        *(make() for make in CASES.values()),
        *(compiled("hybrid", pp=2, keep=keep) for keep in ss.Keep),
        *(compiled("hybrid", pp=2, tp=2, zero=zero) for zero in (0, 1)),
        *(compiled(name) for name in ("zero1", "zero3_offload")),
        *(Case("zero3", 4, overlap=ss.Overlap(prefetch=n)).compiled() for n in (0, 1)),
        *(Case("megatron", 4, overlap=ss.Overlap(moves=on)).compiled() for on in (False, True)),
        Case("one_f_one_b", 2, {"microbatches": 3}, rewrite="late").compiled(),
        Case("one_f_one_b", 2, {"microbatches": 3}).compiled(),
    ]
    found: dict[Hashable, StageEffects] = {}
    for program in variants:
        for key, effects in outlines_of(program):
            assert found.setdefault(key, effects) == effects


# --- footprints of known effects ----------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_memory_is_the_same_whether_effects_were_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch)
    program = CASES[name]()
    devices = program.plan.devices
    before = all_footprints(program, devices)
    monkeypatch.setattr(footprint, "_FOUND", WeakKeyDictionary())
    assert all_footprints(program, devices) == before
    for device in devices:
        forget(monkeypatch)
        alone = all_footprints(program, [device])
        assert alone == {key: found for key, found in before.items() if key[0] == device}


def test_stage_that_sends_to_its_own_device_is_known_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 2 and 3 of a V are on one device; what stage 3 receives is already counted."""
    program = Case("zero_bubble_v", 3, {"microbatches": 2}, model="mlp", sizes={"layers": 6})
    made = program.compiled()
    forget(monkeypatch)
    alone = all_footprints(made, [2])
    forget(monkeypatch)
    last = {key: found for key, found in all_footprints(made, [0, 1, 2]).items() if key[0] == 2}
    assert alone == last


def test_equal_stages_are_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    _ = compiled("hybrid", pp=4).memory
    assert len(footprint._KNOWN) == 3
    _ = compiled("hybrid", pp=4, microbatches=6).memory
    assert len(footprint._KNOWN) == 3


def test_number_of_known_stages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(footprint, "_KNOWN", Known(2))
    _ = compiled("hybrid", pp=4).memory
    assert len(footprint._KNOWN) == 2
