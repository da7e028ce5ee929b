"""The stage problem and its results: text, validation, memory, time and downsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.stages import (
    Candidates,
    Degrees,
    Layer,
    LayerCost,
    PlacedStage,
    StageCut,
    StageProblem,
)
from superscaler_core.published.stages.points import downsets, prefixes
from tests.superscaler_core.published.stages.problems import random_problem

CUTS = [
    "cut 7.5\nstage 0-1 on 0 as 1x1\nstage 2 on 2-3 as 2x1",
    "cut 0.1\nstage 0,2 on 1 as 1x1\nstage 1 on 0 as 1x1",
    "cut inf\nstage 0-2 on 0-3 as 2x2 4x1 1x4",
]


@pytest.mark.parametrize("text", CUTS)
def test_parse_undoes_str(text: str) -> None:
    assert str(StageCut.parse(text)) == text
    assert StageCut.parse(str(StageCut.parse(text))) == StageCut.parse(text)


@pytest.mark.parametrize("degrees", Degrees.powers_of_two(8), ids=str)
def test_parse_undoes_str_of_degrees(degrees: Degrees) -> None:
    assert Degrees.parse(str(degrees)) == degrees


@pytest.mark.parametrize(
    "text, match",
    [
        ("stage 0 on 0 as 1x1", "a cut begins with 'cut SECONDS'"),
        ("cut soon\nstage 0 on 0 as 1x1", "a cut begins with 'cut SECONDS'"),
        ("cut 1.0\nstage 0 at 0 as 1x1", "expected 'stage LAYERS on DEVICES as DEGREES'"),
        ("cut 1.0\nstage 0 on 0 as 1", "expected DATAxTENSOR"),
        ("cut 1.0\nstage 0 on 0,1 as 1x1", "need 1 devices, but 2 were given"),
        ("cut 1.0\nstage 1 on 0 as 1x1", "every layer is in one stage"),
        ("cut 1.0\nstage 0 on 0 as 1x1\nstage 1 on 0 as 1x1", "every device in one at most"),
        ("cut 1.0\nstage 0-1 on 0 as 1x1 1x1 1x1", "each has degrees of its own"),
        ("cut 1.0\nstage a on 0 as 1x1", "expected numbers and ranges"),
    ],
)
def test_parse_rejects_invalid_text(text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        StageCut.parse(text)


def test_has_runs_tells_whether_stages_are_contiguous() -> None:
    assert [StageCut.parse(text).has_runs for text in CUTS] == [True, False, True]


# --- problems -----------------------------------------------------------------------------------


def plain(*, edges: tuple[tuple[int, int], ...] = ((0, 1), (1, 2)), **changes: Any) -> StageProblem:
    """Three layers that take 1, 2 and 3 s, on four devices of two hosts; changes replace fields."""
    layers = tuple(
        Layer(f"l{i}", (LayerCost(i, 1, 10 * i, 8, 2 * i, 1), None), out_bytes=10.0**i)
        for i in range(3)
    )
    problem = StageProblem(
        layers, edges, (Degrees(1, 1), Degrees(1, 2)), (4, 5, 6, 7), 2, 100.0, 10.0, 4, 40.0
    )
    return replace(problem, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"edges": ((1, 0),)},
        {"edges": ((0, 3),)},
        {"layers": ()},
        {"degrees": (Degrees(1, 1),)},
        {"microbatches": 0},
        {"devices": ()},
    ],
    ids=str,
)
def test_invalid_problem_is_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        plain(**changes)


def test_stage_keeps_one_microbatch_for_itself_and_for_each_later_stage() -> None:
    problem = plain()
    (stage,) = problem.placed([((0, 1, 2), Degrees(1, 1))], 0.0).stages
    # Bytes: 3 x 8 at rest, 0 + 2 + 4 per microbatch, and 1 while a layer runs. At most 4
    # microbatches are kept, as there are no more.
    assert [problem.stage_bytes(stage, behind) for behind in range(6)] == [31, 37, 43, 49, 49, 49]


@pytest.mark.parametrize("seed", range(6))
def test_candidates_tell_which_stages_fit_in_memory(seed: int) -> None:
    problem = random_problem(seed)
    points = prefixes(problem)
    candidates = Candidates.of(problem, points)
    for p in range(len(points)):
        for q in range(p + 1, len(points)):
            for c, degrees in enumerate(problem.degrees):
                layers = candidates.layers(p, q)
                stage = PlacedStage(
                    layers, tuple(range(degrees.num_devices)), (degrees,) * len(layers)
                )
                if all(problem.layers[layer].costs[c] is not None for layer in layers):
                    fits = [problem.stage_bytes(stage, b) <= problem.memory_bytes for b in range(9)]
                    assert fits == [b <= candidates.most_behind[p, q, c] for b in range(9)]
                else:
                    assert candidates.most_behind[p, q, c] == -1


def test_step_time_is_stages_plus_transfers_plus_the_longest_reduction() -> None:
    problem = plain()
    alone = Degrees(1, 1)
    cut = problem.placed([((0,), alone), ((1, 2), alone)], 0.0)
    # Stages of 1 s and 5 s. A byte is sent forward and back, at 10 bytes per second. 3 more
    # microbatches take 5 s each, and the longest reduction takes 10 + 20 s.
    assert problem.step_secs(cut) == pytest.approx(1 + 5 + 0.2 + 15 + 30)


def test_stage_with_two_devices_is_placed_on_one_host() -> None:
    problem = plain(degrees=(Degrees(1, 1), Degrees(1, 2)))
    cut = problem.placed([((0,), Degrees(1, 1)), ((1,), Degrees(1, 2)), ((2,), Degrees(1, 1))], 0.0)
    assert [stage.devices for stage in cut.stages] == [(6,), (4, 5), (7,)]


def test_downsets_of_a_chain_are_its_prefixes() -> None:
    assert downsets(plain()) == prefixes(plain()) == (0, 1, 3, 7)


def test_downsets_of_branches_are_their_product() -> None:
    assert downsets(plain(edges=((0, 2),))) == (0, 1, 2, 3, 5, 7)


def test_too_many_downsets_are_refused() -> None:
    layers = plain().layers * 5
    with pytest.raises(PlanError, match="15 layers have more than 100 downsets"):
        downsets(plain(layers=layers, edges=()), most=100)
