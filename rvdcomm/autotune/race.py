"""Race: time candidates on all ranks of a pair, in turns, and let all ranks draw one conclusion."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rvdcomm.api.pending import drain
from rvdcomm.autotune.memory import Memory, Winner, key_of, log
from rvdcomm.autotune.recipes import MODEL, Tuned, plan_of, recipes
from rvdcomm.errors import CommError, LayoutError
from rvdcomm.layout import ITEM_BYTES, Layout, Topology
from rvdcomm.plans.planner import Plan, plan
from rvdcomm.run.agree import exchange_posts
from rvdcomm.run.choice import compiled, executor_name
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.request import check_in_group
from rvdcomm.run.world import World
from rvdcomm.units import secs_text

NUM_TURNS = 5
"""Every candidate runs once in each; the median of the turns counts."""

TURN_SECS, MAX_CALLS = 0.02, 50
"""Short calls are made in a row, as many as take so long."""

MIN_GAIN = 0.05
"""What is not so much faster than the model's choice is not called faster: clocks are noisy."""

Candidate = tuple[str, str]
"""Recipe and executor."""

_memory = Memory()


def tuned(
    src: Layout,
    dst: Layout,
    dtype: Any,
    topology: Topology | None,
    memory_limit: int | None,
    group: Any,
    executor: str | None,
) -> Tuned:
    """``tune``, which documents it."""
    world, executor = World.of(group), executor_name(executor)
    model = plan(src, dst, dtype, topology, memory_limit)
    what = f"tune {src.rvd} -> {dst.rvd}"
    check_in_group(model.path.ranks, world.size, what)
    if world.rank not in model.path.ranks:
        raise LayoutError(f"{what}: rank {world.rank} called it but is in neither layout.")
    drain()
    key = _key(model, memory_limit, world, executor)
    tried = ("auto", "dist") if executor == "auto" else (executor,)
    winner = _known_to_any(key, f"{key} shape {src.shape}", world, model, tried, what)
    measured = winner is None
    if winner is None:
        winner = _race(recipes(model, memory_limit), tried, world, what)
    if _memory.get(key) != winner:
        _memory.put(key, winner)
    made = model if winner.recipe == MODEL else plan_of(winner.recipe, model, memory_limit)
    return Tuned(made, **asdict(winner), measured=measured)


def _key(model: Plan, memory_limit: int | None, world: World, executor: str) -> str:
    num_bytes = ITEM_BYTES[model.dtype] * prod(model.src.shape)
    where = f"{world.backend} {world.size} ranks {executor} rvdcomm {_release()}"
    return key_of(model.src, model.dst, model.dtype, num_bytes, model.topology, memory_limit, where)


def _release() -> str:
    try:
        return metadata.version("rvdcomm")
    except metadata.PackageNotFoundError:
        return "source"


def _known_to_any(
    key: str, asked: str, world: World, model: Plan, tried: Sequence[str], what: str
) -> Winner | None:
    """The winner that some ranks remember; None if none does, or they remember different ones."""
    mine = _memory.get(key)
    if mine is not None and mine.executor not in tried:
        mine = None  # Whatever wrote that, it was not this function.
    post = {"asked": asked, "winner": None if mine is None else asdict(mine)}
    posts = exchange_posts(world, model.path.ranks, post, what)
    first = min(posts)
    for rank, other in posts.items():
        if other["asked"] != posts[first]["asked"]:
            raise LayoutError(
                f"{what}: rank {rank} asked for {other['asked']!r} and rank {first} for "
                f"{posts[first]['asked']!r}; all ranks must ask for the same."
            )
    known = {Winner(**other["winner"]) for other in posts.values() if other["winner"] is not None}
    return known.pop() if len(known) == 1 else None


# --- measuring ----------------------------------------------------------------------------------


def _race(plans: dict[str, Plan], tried: Sequence[str], world: World, what: str) -> Winner:
    """The winner by the times of all ranks, which all of them see."""
    members = plans[MODEL].path.ranks
    calls = _calls(plans, tried, world)
    start_together = _barrier(world, members)
    warm = [min(_timed(call, 1, start_together) for _ in range(2)) for call in calls.values()]
    posts = exchange_posts(world, members, {"secs": warm}, what)
    slowest = [max(secs) for secs in zip(*(post["secs"] for post in posts.values()), strict=True)]
    counts = [max(1, min(MAX_CALLS, int(TURN_SECS / max(secs, 1e-9)))) for secs in slowest]
    turns = [
        [_timed(call, n, start_together) for call, n in zip(calls.values(), counts, strict=True)]
        for _ in range(NUM_TURNS)
    ]
    posts = exchange_posts(world, members, {"turns": turns}, what)
    secs = _median_of_slowest([post["turns"] for post in posts.values()])
    winner = winner_of(dict(zip(calls, secs, strict=True)))
    if world.rank == members[0]:
        _report(plans[MODEL], dict(zip(calls, secs, strict=True)), winner)
    return winner


def winner_of(secs: dict[Candidate, float]) -> Winner:
    """The fastest candidate; the model's choice, which is the first, if it is about as fast.

    >>> winner_of({("model", "auto"): 1.0, ("flat", "auto"): 0.97, ("flat", "dist"): 2.0}).recipe
    'model'
    """
    model = next(iter(secs))
    fastest = min(secs, key=lambda candidate: secs[candidate])
    best = fastest if secs[fastest] < secs[model] * (1 - MIN_GAIN) else model
    return Winner(*best, secs[best], secs[model])


def _calls(
    plans: dict[str, Plan], tried: Sequence[str], world: World
) -> dict[Candidate, Callable[[], object]]:
    """What this rank runs for every candidate. They share shards; nobody looks at their values."""
    model = plans[MODEL]
    dtype: torch.dtype = getattr(torch, model.dtype)
    found = (_shard(layout, dtype, world) for layout in (model.src, model.dst))
    shards = [shard for shard in found if shard is not None]
    calls: dict[Candidate, Callable[[], object]] = {}
    for recipe, made in plans.items():
        for name in tried:
            program = compiled(made, world, name)
            calls[recipe, name] = partial(_run, program, shards, world.device)
            if not program.program.peer_groups:
                break  # "auto" sends messages alone, as "dist" would.
    return calls


def _run(program: RankProgram, shards: list[Tensor], device: Any) -> None:
    program.run(shards, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _shard(layout: Layout, dtype: torch.dtype, world: World) -> Tensor | None:
    if world.rank not in layout:
        return None
    return torch.zeros(layout.cell(world.rank).box.shape, dtype=dtype, device=world.device)


def _barrier(world: World, members: tuple[int, ...]) -> Callable[[], None]:
    """What all members leave at about one time."""
    if len(members) == 1:
        return lambda: None
    subgroup, token = world.subgroup(members), torch.zeros(1, device=world.device)

    def start_together() -> None:
        try:
            subgroup.all_reduce(token).wait()
        except RuntimeError as error:
            raise CommError(f"tune: a rank failed or is late: {error}") from None

    return start_together


def _timed(call: Callable[[], object], num_calls: int, start_together: Callable[[], None]) -> float:
    """Seconds a call on this rank."""
    start_together()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def _median_of_slowest(turns: list[list[list[float]]]) -> list[float]:
    """Seconds of every candidate, from those of every rank in every turn."""
    slowest = [[max(of) for of in zip(*ranks, strict=True)] for ranks in zip(*turns, strict=True)]
    return [median(of_turns) for of_turns in zip(*slowest, strict=True)]


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
