"""Tune: time the best few plans of a pair, and let all ranks choose the same one.

    tuned = rvdcomm.calibration.tune(src, dst, "float32", topology)      # collective
    call = rv.Redistributor(tuned.plan, executor=tuned.executor)

``recipes`` names the plans that are tried, ``winners`` remembers the fastest in this process and in
a file. The log ``rvdcomm.calibration`` (level INFO) says when the cost model chose another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any

from rvdcomm import Layout, LayoutError, Plan, Redistributor, Topology, plan
from rvdcomm.api import drain
from rvdcomm.calibration.clock import Clock, shards_of
from rvdcomm.calibration.recipes import MODEL, plan_of, recipes
from rvdcomm.calibration.winners import Winner, Winners, key_of, log
from rvdcomm.run import World, check_in_group, compare_requests, executor_name
from rvdcomm.units import secs_text

NUM_TURNS = 5
"""Every candidate runs once per turn; the median of the turns counts."""

TURN_SECS, MAX_CALLS = 0.02, 50
"""A short call is repeated in a turn until it has taken this long, at most this often."""

MIN_GAIN = 0.05
"""A candidate replaces the model's choice if it is faster by this share: clocks are noisy."""

Candidate = tuple[str, str]
"""Recipe and executor."""

_winners = Winners()


@dataclass(frozen=True)
class Tuned:
    """The fastest plan, with its seconds per call on the slowest rank.

    ``model_secs`` is the time of the model's choice. ``measured`` says whether this call measured;
    if not, the plan is the winner of an earlier call.
    """

    plan: Plan
    executor: str
    recipe: str
    secs: float
    model_secs: float
    measured: bool


def tune(
    src: Layout,
    dst: Layout,
    dtype: Any = "float32",
    topology: Topology | None = None,
    memory_limit: int | None = None,
    *,
    group: Any = None,
    executor: str | None = None,
) -> Tuned:
    """The fastest measured plan and executor from ``src`` to ``dst``, of the best few by the model.

    Collective over the ranks of ``src`` and ``dst``, which all get the same answer. Nothing is
    measured if the answer is known for this pair, power of two of bytes, topology and world. The
    ranks then still ask each other, because one of them may not know it.

    Args:
        src, dst, dtype, topology, memory_limit: as in ``plan``.
        group: process group; the default group if None.
        executor: as in ``redistribute``; "auto" also tries "dist".

    Raises:
        LayoutError: the request is illegal, or ranks disagree about it.
        MemoryLimitError: no plan fits.
        CommError: a rank failed, or did not join within the group's timeout.
    """
    world, executor = World.of(group), executor_name(executor)
    model = plan(src, dst, dtype, topology, memory_limit)
    what = f"tune {src.rvd} -> {dst.rvd}"
    check_in_group(model.path.ranks, world.size, what)
    if world.rank not in model.path.ranks:
        raise LayoutError(f"{what}: rank {world.rank} called it but is in neither layout.")
    drain()
    key = key_of(model, memory_limit, f"{world.backend} {world.size} ranks {executor} {_release()}")
    tried = ("auto", "dist") if executor == "auto" else (executor,)
    mine = _winners.get(key)
    if mine is not None and mine.executor not in tried:
        mine = None  # The entry was not written by this function.
    own = None if mine is None else asdict(mine)
    request = f"{key} shape {src.shape}"
    posts = compare_requests(world, model.path.ranks, {"request": request}, what, winner=own)
    known = {Winner(**post["winner"]) for post in posts.values() if post["winner"] is not None}
    # Ranks that remember different winners measure again.
    measured = len(known) != 1
    winner = _race(recipes(model, memory_limit), tried, world, group) if measured else known.pop()
    if mine != winner:
        _winners.put(key, winner)
    made = plan_of(winner.recipe, model, memory_limit)
    return Tuned(made, **asdict(winner), measured=measured)


def _release() -> str:
    try:
        return f"rvdcomm {metadata.version('rvdcomm')}"
    except metadata.PackageNotFoundError:
        return "rvdcomm source"


def _race(plans: dict[str, Plan], tried: Sequence[str], world: World, group: Any) -> Winner:
    """Time all candidates in turns; every rank sees the times of the slowest."""
    model = plans[MODEL]
    calls = _calls(plans, tried, world, group)
    secs = dict(zip(calls, _times(Clock(model.path.ranks, group), calls), strict=True))
    winner = winner_of(secs)
    if world.rank == model.path.ranks[0]:
        _report(model, secs, winner)
    return winner


def _times(clock: Clock, calls: dict[Candidate, Callable[[], object]]) -> list[float]:
    """Seconds per call of every candidate."""
    warm = [min(clock.secs(call) for _ in range(2)) for call in calls.values()]
    counts = [max(1, min(MAX_CALLS, int(TURN_SECS / max(secs, 1e-9)))) for secs in warm]
    turns = [
        [clock.secs(call, n) for call, n in zip(calls.values(), counts, strict=True)]
        for _ in range(NUM_TURNS)
    ]
    return [median(of_turns) for of_turns in zip(*turns, strict=True)]


def winner_of(secs: dict[Candidate, float]) -> Winner:
    """The fastest candidate; the first, which is the model's choice, if it is about as fast.

    >>> winner_of({("model", "auto"): 1.0, ("flat", "auto"): 0.97, ("flat", "dist"): 2.0}).recipe
    'model'
    """
    model = next(iter(secs))
    fastest = min(secs, key=lambda candidate: secs[candidate])
    best = fastest if secs[fastest] < secs[model] * (1 - MIN_GAIN) else model
    return Winner(*best, secs[best], secs[model])


def _calls(
    plans: dict[str, Plan], tried: Sequence[str], world: World, group: Any
) -> dict[Candidate, Callable[[], object]]:
    """The call of this rank for every candidate; all calls share the same shards of zeros."""
    model = plans[MODEL]
    src, dst = shards_of(model.src, model.dst, model.dtype, world)
    calls: dict[Candidate, Callable[[], object]] = {}
    for recipe, made in plans.items():
        for name in tried:
            run = Redistributor(made, group, executor=name)
            calls[recipe, name] = partial(run, src, out=dst)
            if not run.plan.domains:
                break  # "auto" sends messages alone, as "dist" would.
    return calls


def _report(model: Plan, secs: dict[Candidate, float], winner: Winner) -> None:
    best = winner.recipe, winner.executor
    what = f"{model.src} -> {model.dst} {model.dtype}"
    times = ", ".join(f"{' '.join(name)} {secs_text(t)}" for name, t in secs.items())
    if best == next(iter(secs)):
        log.info("%s: the model's choice is the fastest: %s", what, times)
    else:
        log.info(
            "%s: the model's choice is not the fastest: it takes %s and %s takes %s (%s)",
            *(what, secs_text(winner.model_secs), " ".join(best), secs_text(winner.secs), times),
        )
