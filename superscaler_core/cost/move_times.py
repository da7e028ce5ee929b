"""Move times: moving tensors from where they are written or stored to where they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from superscaler_core.cost.comm_cost import CallSecs, CommCosts
from superscaler_core.cost.prices import MAX_PRICES, EdgeCost, SyncCost
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.known import remembers
from superscaler_core.materialize.edges import is_inline
from superscaler_core.materialize.sharding import Sharding, shardings_of
from superscaler_core.materialize.transfer import Transfer, transfers
from superscaler_core.plan import OpSplit
from superscaler_core.precision import Precision


@dataclass(frozen=True, eq=False)
class MoveTimes:
    """Times of moves, by both ends; equal moves are computed once.

    Each tensor takes ``move_secs`` more; ``update_secs`` is the time of the optimizer, by the bytes
    that a device stores.
    """

    comm_costs: CommCosts
    method: str
    move_secs: float
    update_secs: Callable[[int], float]
    precision: Precision

    def secs(self, sub_transfers: Iterable[Transfer]) -> float:
        """Seconds of calls one after another."""
        return sum(call.secs + self.move_secs for call in self._calls(sub_transfers))

    def _calls(self, sub_transfers: Iterable[Transfer]) -> tuple[CallSecs, ...]:
        moving = (sub_transfer for sub_transfer in sub_transfers if not sub_transfer.is_idle)
        return tuple(self.comm_costs.secs(sub_transfer, self.method) for sub_transfer in moving)

    @remembers(MAX_PRICES)
    def between(
        self, src: Sharding, dst: Sharding, shape: tuple[int, ...], dtype: str, has_grad: bool
    ) -> EdgeCost:
        """The cost from one end to another."""
        if is_inline(src, dst, has_grad):
            return EdgeCost(0.0, 0.0, 0)
        forward = transfers(src, dst.whole, shape, dtype)
        backward = transfers(dst, src.whole, shape, dtype) if has_grad else ()
        num_calls = sum(not sub_transfer.is_idle for sub_transfer in (*forward, *backward))
        return EdgeCost(self.secs(forward), self.secs(backward), num_calls)

    @remembers(MAX_PRICES)
    def sync(self, update: OpForm, sharding: Sharding, storage: OpSplit | None) -> SyncCost:
        """The cost of a parameter, from its update, its readers' end and its storage's split."""
        (of,) = update.outputs
        if storage is None:
            stored = Sharding.joined([sharding]).resident
        else:
            (stored,) = shardings_of(update, storage).outputs
        is_stored = all(
            device in stored.shards and stored.shards[device].box == shard.box
            for device, shard in sharding.shards.items()
        )
        fetch = () if is_stored else transfers(stored, sharding.whole, of.shape, of.dtype)
        if not of.requires_grad:
            return SyncCost(self._calls(fetch), (), 0.0)
        dtype = self.precision.stored(of.dtype)
        reduce = transfers(sharding, stored, of.shape, of.dtype)
        most = max(stored.num_elements.values()) * ITEM_BYTES[dtype]
        return SyncCost(
            self._calls(fetch),
            self._calls(sub_transfer.of_dtype(dtype) for sub_transfer in reduce),
            self.update_secs(most),
        )
