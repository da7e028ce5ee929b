"""Clock: the seconds that a collective call takes on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from rvdcomm import Layout, Redistributor, plan
from rvdcomm.run import World


class Clock:
    """Times calls that ``members`` of a group make together; each method is collective over them.

    Every rank gets the same number. A rank may therefore decide from it what to run next.
    """

    def __init__(self, members: tuple[int, ...], group: Any = None) -> None:
        n = len(members)
        src = Layout((n,), f"R(1)V(1)D({n})", members)
        dst = Layout((n,), f"R({n})V(1)D(1)", members)
        self._gather = Redistributor(plan(src, dst, "float64"), group, executor="dist")
        self._device = World.of(group).device

    def secs(self, call: Callable[[], object], num_calls: int = 1) -> float:
        """Seconds per call, of ``num_calls`` in a row, on the slowest rank.

        Raises:
            CommError: a rank failed, or did not join within the group's timeout.
        """
        return max(self.secs_of_each(call, num_calls))

    def secs_of_each(self, call: Callable[[], object], num_calls: int = 1) -> list[float]:
        """Seconds per call, of ``num_calls`` in a row, on each member; errors as of ``secs``."""
        self._all(0.0)  # The ranks leave this call at about the same time.
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self._all((time.perf_counter() - start) / num_calls)

    def _all(self, secs: float) -> list[float]:
        """The numbers of all members."""
        mine = torch.tensor([secs], dtype=torch.float64, device=self._device)
        found: list[float] = self._gather(mine).tolist()
        return found


def shards_of(src: Layout, dst: Layout, dtype: str, world: World) -> list[torch.Tensor | None]:
    """Tensors to call a plan with: this rank's shards of zeros, or None where it has none."""
    return [
        torch.zeros(
            layout.cell(world.rank).box.shape, dtype=getattr(torch, dtype), device=world.device
        )
        if world.rank in layout
        else None
        for layout in (src, dst)
    ]
