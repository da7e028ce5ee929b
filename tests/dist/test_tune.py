"""Tuning on real processes: all ranks agree, measure once, and the winner moves the right data."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm.calibration import Tuned, Winner, log, tune
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of
from tests.dist.world import Worlds

# The package exports the function under the name of its module.
module = sys.modules["rvdcomm.calibration.tune"]

NUM_RANKS = 4
HOSTS = rv.Topology.hosts([[0, 2], [1, 3]], rv.Link(1e-5, 1e9), rv.Link(1e-4, 1e8))
PAIR = rv.Layout((6, 10), "R(1)V(2)D(2,1)"), rv.Layout((6, 10), "R(2)V(1)D(1,2)")
SMALLER = rv.Layout((6, 8), "R(1)V(2)D(2,1)"), rv.Layout((6, 8), "R(2)V(1)D(1,2)")
LATE = rv.Layout((9, 10), "R(1)V(1)D(3,1)"), rv.Layout((9, 10), "R(1)V(1)D(1,2)", ranks=[1, 2])

Found = tuple[str, str, bool, str]
"""Recipe, executor, whether it was measured, and the path."""


def tuned_call(rank: int, folder: Path, pair: tuple[rv.Layout, rv.Layout], name: str) -> Found:
    """What this rank found, which moves the tensor right."""
    use_cache(folder)
    found = tune(*pair, "float32", HOSTS, executor=name)
    call = rv.Redistributor(found.plan, executor=found.executor)
    assert_moved(call(shard_of(rank, pair[0])), *pair)
    return agreed(found)


def use_cache(folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder)


def agreed(found: Tuned) -> Found:
    """What all ranks found."""
    mine = found.recipe, found.executor, found.measured, str(found.plan.path)
    assert gathered(mine) == [mine] * NUM_RANKS
    return mine


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(values, value)
    return values


def forget(rank: int) -> None:
    module._winners.clear()


pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", ["auto", "dist"])
@on_ranks(NUM_RANKS)
def test_all_ranks_get_the_same_correct_plan(rank: int, tmp_path: Path, name: str) -> None:
    forget(rank)
    _, executor, measured, _ = tuned_call(rank, tmp_path, PAIR, name)
    assert measured, "nobody could know it"
    assert executor in {"auto": ("auto", "dist"), "dist": ("dist",)}[name]


def test_measured_winner_is_reused_for_similar_sizes_and_by_new_processes(
    worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds(NUM_RANKS)
    world.run(forget)
    found = [world.run(tuned_call, tmp_path, pair, "auto")[0] for pair in (PAIR, PAIR, SMALLER)]
    world.stop()
    found += world.run(tuned_call, tmp_path, PAIR, "auto")
    assert [measured for _, _, measured, _ in found] == [True] + [False] * (2 + NUM_RANKS)
    assert {(recipe, executor) for recipe, executor, _, _ in found} == {found[0][:2]}


FLAT, DIRECT = Winner("flat", "dist", 1e-3, 2e-3), Winner("direct", "auto", 1e-3, 2e-3)
STRANGE = Winner("flat", "teleport", 1e-3, 2e-3)


@pytest.mark.parametrize(
    "winners, is_measured",
    [
        ({2: FLAT}, False),
        ({0: FLAT, 1: FLAT, 2: FLAT, 3: FLAT}, False),
        ({0: FLAT, 3: DIRECT}, True),
        ({1: STRANGE}, True),
    ],
    ids=["one knows", "all know", "they disagree", "one was told nonsense"],
)
@on_ranks(NUM_RANKS)
def test_cached_winner_is_used_without_measuring_only_if_ranks_agree_on_it(
    rank: int, tmp_path: Path, winners: dict[int, Winner], is_measured: bool
) -> None:
    """Ranks tune with a cache folder each, some of which have a winner."""
    forget(rank)
    use_cache(tmp_path / str(rank))
    if rank in winners:
        where = f"gloo {NUM_RANKS} ranks auto {module._release()}"
        key = module.key_of(rv.plan(*PAIR, "float32", HOSTS), None, where)
        module._winners.put(key, winners[rank])
    recipe, executor, measured, _ = agreed(tune(*PAIR, "float32", HOSTS))
    assert measured == is_measured
    assert measured or (recipe, executor) == ("flat", "dist")
    assert agreed(tune(*PAIR, "float32", HOSTS))[:3] == (recipe, executor, False)


@on_ranks(NUM_RANKS)
def test_tune_is_an_error_only_on_ranks_outside_both_layouts(rank: int, tmp_path: Path) -> None:
    use_cache(tmp_path)
    result = None
    if rank == 3:
        error = error_of(lambda: tune(*LATE, topology=HOSTS))
        assert "rank 3 called it but is in neither layout" in error
    else:
        found = tune(*LATE, "float32", HOSTS)
        result = rv.Redistributor(found.plan, executor=found.executor)(shard_of(rank, LATE[0]))
    assert_moved(result, *LATE)


@on_ranks(NUM_RANKS)
def test_disagreement_about_the_layouts_is_an_error_on_every_rank(
    rank: int, tmp_path: Path
) -> None:
    use_cache(tmp_path)
    error = error_of(lambda: tune(*(SMALLER if rank == 2 else PAIR), topology=HOSTS))
    assert "tune R(1)V(2)D(2,1) -> R(2)V(1)D(1,2): ranks disagree about request" in error
    assert ", rank 2 for " in error


@pytest.mark.parametrize(
    "secs, message, won",
    [
        ([3e-3, 2e-3], "is not the fastest: it takes 3 ms and model dist takes 2 ms", "dist"),
        ([3e-3, 4e-3], "is the fastest: model auto 3 ms, model dist 4 ms", "auto"),
        ([3e-3, 2.9e-3], "is the fastest: model auto 3 ms, model dist 2.9 ms", "auto"),
    ],
    ids=["another is faster", "the model is right", "as good as equal"],
)
@on_ranks(NUM_RANKS)
def test_log_says_whether_the_choice_of_the_model_is_the_fastest(
    rank: int, tmp_path: Path, secs: list[float], message: str, won: str
) -> None:
    """The candidates take these times; the first rank logs the race."""
    forget(rank)
    use_cache(tmp_path)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        times = [*secs, *[9.0] * 99]
        patch.setattr(module, "_times", lambda clock, calls: times[: len(calls)])
        found = tune(*PAIR, "float32", HOSTS)
    log.removeHandler(handler)
    assert [f"the model's choice {message}" in line for line in lines] == [True] * (rank == 0)
    best = secs[1] if won == "dist" else secs[0]
    assert (found.recipe, found.executor) == ("model", won)
    assert (found.secs, found.model_secs) == (best, secs[0])


@pytest.mark.parametrize(
    "secs, won", [([1.0, 0.5, 0.4], 2), ([1.0, 0.97, 1.1], 0), ([1.0, 0.9, 0.9], 1), ([1.0], 0)]
)
def test_fastest_candidate_wins_only_by_more_than_the_noise(secs: list[float], won: int) -> None:
    names = [("model", "auto"), ("flat", "auto"), ("direct", "dist")]
    winner = module.winner_of(dict(zip(names, secs, strict=False)))
    assert (winner.recipe, winner.executor) == names[won]
    assert (winner.secs, winner.model_secs) == (secs[won], 1.0)
