"""Model cost: the costs of a model's blocks on one device, as values."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from superscaler_core.cost import MemoryCost
from superscaler_core.materialize.sharding import Sharding


@dataclass(frozen=True, slots=True)
class WeightCosts:
    """Parameters on a device.

    Attributes:
        num_bytes: bytes that the device reads, in the model's dtype.
        grad_bytes: bytes of their gradient, in the master weights' dtype; 0 if not trained.
        replicas: devices of the stage that read the same box.
        name: of a parameter that ops outside the block read as well; empty for all others together.
    """

    num_bytes: int
    grad_bytes: int
    replicas: int
    name: str = ""

    def among(self, times: int) -> WeightCosts:
        """The same parameters in a stage of so many times the replicas."""
        return replace(self, replicas=self.replicas * times)


@dataclass(frozen=True, slots=True)
class Output:
    """A result of a block that later blocks read, as it is on the devices that were priced.

    Its ends are ``src`` and ``dst``, if the later block is on the same devices.
    """

    shape: tuple[int, ...]
    dtype: str
    has_grad: bool
    src: Sharding
    dst: Sharding


@dataclass(frozen=True, eq=False)
class BlockCost:
    """The cost of a block on one device of its stage, per microbatch.

    Attributes:
        forward_secs, backward_secs: computing, without recomputation.
        again_secs: recomputation, with the communication inside regions recomputed as a whole.
        sent_secs, received_secs: communication inside the stage, forward and backward.
        alone_shares: shares of computing in the forward and the backward before the first
            communication.
        memory: memory of its activations.
        weights: its parameters.
        outputs: its results that later blocks read.
    """

    forward_secs: float
    backward_secs: float
    again_secs: float
    sent_secs: float
    received_secs: float
    alone_shares: tuple[float, float]
    memory: MemoryCost
    weights: tuple[WeightCosts, ...]
    outputs: tuple[Output, ...]

    def between(self, other: BlockCost, share: float) -> BlockCost:
        """The cost at this share of the way to the cost with more samples."""
        found: dict[str, Any] = {
            name: _between(getattr(self, name), getattr(other, name), share) for name in SECS
        }
        names = (each.name for each in fields(MemoryCost) if each.name.endswith("_bytes"))
        pairs = ((name, getattr(self.memory, name), getattr(other.memory, name)) for name in names)
        num_bytes: dict[str, Any] = {name: round(_between(a, b, share)) for name, a, b in pairs}
        return replace(self, **found, memory=replace(self.memory, **num_bytes))

    def without(self, names: Set[str]) -> BlockCost:
        """The same cost without some parameters."""
        return replace(self, weights=tuple(w for w in self.weights if w.name not in names))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The costs of the ops before a model's blocks, of every block, and of the ops behind them."""

    before: tuple[BlockCost, ...]
    layers: tuple[BlockCost, ...]
    behind: tuple[BlockCost, ...]

    def between(self, other: ModelCost, share: float) -> ModelCost:
        """The costs at this share of the way to the costs with more samples."""

        @cache
        def one(mine: BlockCost, theirs: BlockCost) -> BlockCost:
            return mine.between(theirs, share)

        groups = ((getattr(each, field.name) for each in (self, other)) for field in fields(self))
        return ModelCost(*(tuple(map(one, *group)) for group in groups))

    def stages(self, sizes: Sequence[int]) -> list[tuple[BlockCost, ...]]:
        """The costs of the blocks of every stage, which have ``sizes`` blocks."""
        rows, behind = [self.layers[a:b] for a, b in pairwise([0, *accumulate(sizes)])], self.behind
        if len(sizes) == 1:
            # A table for look-ups that is the head as well is stored once.
            shared = {weight.name for block in self.before for weight in block.weights} - {""}
            behind = tuple(block.without(shared) for block in behind)
        rows[0], rows[-1] = (*self.before, *rows[0]), (*rows[-1], *behind)
        return rows


SECS = ("forward_secs", "backward_secs", "again_secs", "sent_secs", "received_secs")
"""Names of the times of a block."""


def _between(first: float, last: float, share: float) -> float:
    return first + share * (last - first)


def as_one(chain: Sequence[MemoryCost]) -> MemoryCost:
    """The memory of consecutive ops as that of one op.

    Law (tests/superscaler_core/planners/auto/test_block_costs.py): ``peak_bytes`` of a chain is
    that of the chain in which consecutive costs are replaced by their ``as_one``.
    """
    before = [0, *accumulate(each.kept_bytes for each in chain)]
    behind = [0, *accumulate(each.grads_bytes for each in reversed(chain))][::-1]

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in chain)

    def most(name: str, added: Sequence[int]) -> int:
        rows = zip(chain, before, added, strict=False)
        return max((getattr(each, name) + a + b for each, a, b in rows), default=0)

    none = [0] * len(chain)
    return MemoryCost(
        total("weights_bytes"),
        total("grads_bytes"),
        total("states_bytes"),
        before[-1],
        chain[0].input_bytes if chain else 0,
        most("forward_bytes", none),
        most("backward_bytes", none),
        most("first_backward_bytes", behind[1:]),
    )
