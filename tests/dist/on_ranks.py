"""Tests that run on every rank of a world, and compare there."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

import rvdcomm as rv
from tests.dist.shards import faults_of
from tests.dist.world import Worlds

Body = Callable[..., None]


def on_ranks(
    num_ranks: int,
    timeout_secs: float = 20.0,
    *,
    is_last: bool = False,
    dying: Sequence[int] = (),
) -> Callable[[Body], Body]:
    """Make a test of a function ``(rank, *parameters)`` that asserts in the process of each rank.

    Args:
        num_ranks: number of ranks of the world.
        timeout_secs: timeout of its process group.
        is_last: end the processes after the test, because it leaves them a failed group.
        dying: ranks whose processes end in the test.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def test(worlds: Worlds, **parameters: Any) -> None:
            world = worlds(num_ranks, timeout_secs)
            world.run(_run, body.__module__, body.__name__, parameters, dying=dying)
            if is_last:
                world.stop()

        named = inspect.signature(body)
        _, *parameters = named.parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter("worlds", kind), *parameters]
        test.__signature__ = named.replace(parameters=arguments)  # type: ignore[attr-defined]
        return test

    return decorate


def _run(rank: int, module: str, name: str, parameters: dict[str, Any]) -> None:
    """Run the body of a test, which is found by its name, because the test stands in its place."""
    __import__(module)
    inspect.unwrap(getattr(sys.modules[module], name))(rank, **parameters)


def assert_moved(
    result: Any,
    src: rv.Layout,
    dst: rv.Layout,
    seed: int = 0,
    dtype: str = "float32",
    group: Any = None,
) -> None:
    """Check, on all ranks of the group together, what each got for its ``shard_of`` of a seed."""
    results: list[Any] = [None] * dist.get_world_size(group)
    mine = None if result is None else result.detach().numpy()
    dist.all_gather_object(results, mine, group=group)
    assert faults_of(results, src, dst, seed, dtype) == []
