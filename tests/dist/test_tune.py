"""Tuning on real processes: all ranks agree, measure once, and the winner moves the right data."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm.calibration import Tuned, tune
from rvdcomm.calibration.winners import Winner, log
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import Worlds

# The package exports the function under the name of its module.
module = sys.modules["rvdcomm.calibration.tune"]

NUM_RANKS = 4
HOSTS = rv.Topology.hosts([[0, 2], [1, 3]], rv.Link(1e-5, 1e9), rv.Link(1e-4, 1e8))
PAIR = rv.Layout((6, 10), "R(1)V(2)D(2,1)"), rv.Layout((6, 10), "R(2)V(1)D(1,2)")
SMALLER = rv.Layout((6, 8), "R(1)V(2)D(2,1)"), rv.Layout((6, 8), "R(2)V(1)D(1,2)")
LATE = rv.Layout((9, 10), "R(1)V(1)D(3,1)"), rv.Layout((9, 10), "R(1)V(1)D(1,2)", ranks=[1, 2])

Found = tuple[str, str, bool, str, Any]
"""Recipe, executor, whether it was measured, the path, and this rank's result."""


def tuned_call(rank: int, folder: str, pair: tuple[rv.Layout, rv.Layout], name: str) -> Found:
    os.environ["XDG_CACHE_HOME"] = folder
    found = tune(*pair, "float32", HOSTS, executor=name)
    call = rv.Redistributor(found.plan, executor=found.executor)
    result = call(shard_of(rank, pair[0])) if rank in (*pair[0].ranks, *pair[1].ranks) else None
    return (*seen(found), None if result is None else result.numpy())


def seen(found: Tuned) -> tuple[str, str, bool, str]:
    return found.recipe, found.executor, found.measured, str(found.plan.path)


def forget(rank: int) -> None:
    module._winners.clear()


pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", ["auto", "dist"])
def test_all_ranks_get_the_same_correct_plan(worlds: Worlds, tmp_path: Path, name: str) -> None:
    found = worlds(NUM_RANKS).run(tuned_call, str(tmp_path), PAIR, name)
    assert len({answer[:4] for answer in found}) == 1
    assert found[0][2], "nobody could know it"
    assert found[0][1] in {"auto": ("auto", "dist"), "dist": ("dist",)}[name]
    assert faults_of([answer[4] for answer in found], *PAIR) == []


def test_second_call_and_tensor_of_similar_size_reuse_the_measured_winner(
    worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(NUM_RANKS)
    world.run(forget)
    first = world.run(tuned_call, str(tmp_path), PAIR, "auto")
    second = world.run(tuned_call, str(tmp_path), PAIR, "auto")
    third = world.run(tuned_call, str(tmp_path), SMALLER, "auto")
    assert [answer[2] for answer in (*first, *second, *third)] == [True] * 4 + [False] * 8
    assert {answer[:2] for answer in (*first, *second, *third)} == {first[0][:2]}
    assert faults_of([answer[4] for answer in third], *SMALLER) == []


def test_new_processes_read_the_winner_from_the_file(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds(NUM_RANKS)
    world.run(forget)
    first = world.run(tuned_call, str(tmp_path), PAIR, "auto")
    world.stop()
    again = world.run(tuned_call, str(tmp_path), PAIR, "auto")
    assert [answer[2] for answer in again] == [False] * NUM_RANKS
    assert {answer[:2] for answer in again} == {first[0][:2]}


def tuned_after(rank: int, folder: str, winners: dict[int, Winner], pair: Any) -> Found:
    """Tune with a cache folder per rank, some of which have a winner."""
    module._winners.clear()
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    if rank in winners:
        where = f"gloo {NUM_RANKS} ranks auto {module._release()}"
        key = module.key_of(rv.plan(*pair, "float32", HOSTS), None, where)
        module._winners.put(key, winners[rank])
    found = tune(*pair, "float32", HOSTS)
    again = tune(*pair, "float32", HOSTS)
    assert seen(again)[:2] == seen(found)[:2]
    assert not again.measured
    return (*seen(found), None)


FLAT, DIRECT = Winner("flat", "dist", 1e-3, 2e-3), Winner("direct", "auto", 1e-3, 2e-3)
STRANGE = Winner("flat", "teleport", 1e-3, 2e-3)


@pytest.mark.parametrize(
    "winners, measured",
    [
        ({2: FLAT}, False),
        ({0: FLAT, 1: FLAT, 2: FLAT, 3: FLAT}, False),
        ({0: FLAT, 3: DIRECT}, True),
        ({1: STRANGE}, True),
    ],
    ids=["one knows", "all know", "they disagree", "one was told nonsense"],
)
def test_cached_winner_is_used_without_measuring_only_if_ranks_agree_on_it(
    worlds: Worlds, tmp_path: Path, winners: dict[int, Winner], measured: bool
) -> None:
    found = worlds(NUM_RANKS).run(tuned_after, str(tmp_path), winners, PAIR)
    assert len({answer[:4] for answer in found}) == 1
    assert found[0][2] == measured
    assert measured or found[0][:2] == ("flat", "dist")


def ranks_of_the_pair_tune(rank: int, folder: str) -> Any:
    os.environ["XDG_CACHE_HOME"] = folder
    if rank == 3:
        return error_of(lambda: tune(*LATE, topology=HOSTS))
    return tuned_call(rank, folder, LATE, "auto")


def test_tune_is_an_error_only_on_ranks_outside_both_layouts(
    worlds: Worlds, tmp_path: Path
) -> None:
    found = worlds(NUM_RANKS).run(ranks_of_the_pair_tune, str(tmp_path))
    assert "rank 3 called it but is in neither layout" in str(found[3])
    assert faults_of([answer[4] for answer in found[:3]] + [None], *LATE) == []


def tune_something_else_on_rank_2(rank: int, folder: str) -> Any:
    os.environ["XDG_CACHE_HOME"] = folder
    pair = SMALLER if rank == 2 else PAIR
    return error_of(lambda: tune(*pair, topology=HOSTS))


def test_disagreement_about_the_layouts_is_an_error_on_every_rank(
    worlds: Worlds, tmp_path: Path
) -> None:
    for error in worlds(NUM_RANKS).run(tune_something_else_on_rank_2, str(tmp_path)):
        assert "tune R(1)V(2)D(2,1) -> R(2)V(1)D(1,2): ranks disagree about request" in str(error)
        assert ", rank 2 for " in str(error)


def logged_race(rank: int, folder: str, secs: list[float]) -> tuple[list[str], tuple[Any, ...]]:
    """What is logged when the candidates take these times."""
    module._winners.clear()
    os.environ["XDG_CACHE_HOME"] = folder
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    times = module._times
    module._times = lambda clock, calls: [*secs, *[9.0] * (len(calls) - len(secs))]
    try:
        found = tune(*PAIR, "float32", HOSTS)
    finally:
        module._times = times
        log.removeHandler(handler)
    return lines, (found.recipe, found.executor, found.secs, found.model_secs)


@pytest.mark.parametrize(
    "secs, message, won",
    [
        ([3e-3, 2e-3], "is not the fastest: it takes 3 ms and model dist takes 2 ms", "dist"),
        ([3e-3, 4e-3], "is the fastest: model auto 3 ms, model dist 4 ms", "auto"),
        ([3e-3, 2.9e-3], "is the fastest: model auto 3 ms, model dist 2.9 ms", "auto"),
    ],
    ids=["another is faster", "the model is right", "as good as equal"],
)
def test_log_says_whether_the_choice_of_the_model_is_the_fastest(
    worlds: Worlds, tmp_path: Path, secs: list[float], message: str, won: str
) -> None:
    found = worlds(NUM_RANKS).run(logged_race, str(tmp_path), secs)
    (line,) = found[0][0]
    assert f"the model's choice {message}" in line
    assert [lines for lines, _ in found[1:]] == [[], [], []]
    best = secs[1] if won == "dist" else secs[0]
    assert {answer for _, answer in found} == {("model", won, best, secs[0])}


@pytest.mark.parametrize(
    "secs, won", [([1.0, 0.5, 0.4], 2), ([1.0, 0.97, 1.1], 0), ([1.0, 0.9, 0.9], 1), ([1.0], 0)]
)
def test_fastest_candidate_wins_only_by_more_than_the_noise(secs: list[float], won: int) -> None:
    names = [("model", "auto"), ("flat", "auto"), ("direct", "dist")]
    winner = module.winner_of(dict(zip(names, secs, strict=False)))
    assert (winner.recipe, winner.executor) == names[won]
    assert (winner.secs, winner.model_secs) == (secs[won], 1.0)
