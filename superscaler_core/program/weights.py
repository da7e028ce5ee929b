"""Weights: where each parameter is stored, where it is used, and how its gradient comes home.

Storage is what the optimizer's op was put on; where a plan says nothing, every device stores what
it uses. A *use* is a set of ops that share one copy of the parameter on each device: all that are
in no window, or those of one window (``Plan.gather_weights``, ``Plan.reduce_grads``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.savings import Window
from superscaler_core.program.edges import Edges, Reader, input_side, output_side
from superscaler_core.program.side import Side, View
from superscaler_core.program.transfer import Transfer, transfers


@dataclass(frozen=True, eq=False)
class Use:
    """A parameter as some ops read it.

    Attributes:
        number: among the uses of the parameter.
        tensor: the parameter.
        storage: the end where it is stored.
        side: the end where it is read; its summands are those of the gradient.
        readers: the ops.
        window: when it comes and goes; None if it is there all the time.
    """

    number: int
    tensor: PTensor
    storage: Side
    side: Side
    readers: tuple[Reader, ...]
    window: Window | None

    @property
    def name(self) -> str:
        """For generated code: of the parameter, and which use it is if there are several."""
        return self.tensor.name + (f"#{self.number}" if self.number else "")

    @property
    def is_fetched(self) -> bool:
        """Whether it is gathered for its window, and dropped after."""
        return self.window is not None and self.window.gathers

    @cached_property
    def is_stored(self) -> bool:
        """Whether every device that reads it stores just that."""
        return not self.is_fetched and all(
            device in self.storage.shards and self.storage.shards[device].box == shard.box
            for device, shard in self.side.shards.items()
        )

    @cached_property
    def fetch(self) -> tuple[Transfer, ...]:
        """What takes it from storage to where it is read; nothing if it is there."""
        if self.is_stored:
            return ()
        return transfers(self.storage, self.side.whole, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def reduce(self) -> tuple[Transfer, ...]:
        """What takes its gradient to storage; nothing if it is not trained."""
        if not self.tensor.requires_grad:
            return ()
        return transfers(self.side, self.storage, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def is_brought(self) -> bool:
        """Whether communication brings it."""
        return any(not leg.is_idle for leg in self.fetch)

    @cached_property
    def is_reduced(self) -> bool:
        """Whether communication takes its gradient to storage."""
        return any(not leg.is_idle for leg in self.reduce)

    @cached_property
    def most_bytes(self) -> int:
        """Of the device that reads most of it."""
        return max(self.side.num_elements.values()) * ITEM_BYTES[self.tensor.dtype]


@dataclass(frozen=True, eq=False)
class Weights:
    """All parameters of a plan."""

    storage: Mapping[PTensor, Side]
    uses: tuple[Use, ...]

    @cached_property
    def of_reader(self) -> Mapping[Reader, Use]:
        """The copy that a reader reads."""
        return {reader: use for use in self.uses for reader in use.readers}


def find_weights(plan: Plan, edges: Edges) -> Weights:
    """Where all parameters are stored and used."""
    window_of: dict[Op, Window] = {op: w for w in plan.windows for op in w.ops}
    uses: list[Use] = []
    storage: dict[PTensor, Side] = {}
    for tensor in plan.graph.parameters.values():
        storage[tensor], found = uses_of(plan, edges.deferred, tensor, window_of)
        uses += found
    return Weights(storage, tuple(uses))


def uses_of(
    plan: Plan,
    deferred: Mapping[Op, Mapping[Device, int]],
    tensor: PTensor,
    window_of: Mapping[Op, Window],
) -> tuple[Side, tuple[Use, ...]]:
    """Where one parameter is stored, and its uses.

    Args:
        plan: the decisions.
        deferred: as of ``Edges``.
        tensor: the parameter.
        window_of: the window of an op, if it is in one.
    """
    groups: dict[Window | None, list[Reader]] = {}
    for reader in plan.graph.readers.get(tensor, ()):
        groups.setdefault(window_of.get(reader[0]), []).append(reader)
    sides = {
        window: Side.joined(_read_by(plan, deferred, *reader) for reader in group)
        for window, group in groups.items()
    }
    storage = _storage(plan, tensor, sides)
    return storage, tuple(
        Use(number, tensor, storage, sides[window], tuple(group), window)
        for number, (window, group) in enumerate(groups.items())
    )


def _read_by(
    plan: Plan, deferred: Mapping[Op, Mapping[Device, int]], op: Op, position: int
) -> Side:
    """The end at which an op reads a parameter."""
    side = input_side(plan, op, position)
    shares = deferred.get(op)
    return side if shares is None else shared(side, shares)


def shared(side: Side, shares: Mapping[Device, int]) -> Side:
    """The end at which replicas read a parameter that each give back a share of its gradient."""
    views = {View(view.device, view.box, shares[view.device]) for view in side.views}
    return Side(1 + max(shares.values()), tuple(sorted(views)))


def _storage(
    plan: Plan,
    tensor: PTensor,
    sides: Mapping[Window | None, Side],
) -> Side:
    op = plan.update(tensor.name)
    if plan.has_parts(op):
        return output_side(plan, op, 0)
    if sides:
        return Side.joined(sides.values()).resident
    # Nobody reads it: the first device keeps it, so that what is saved is whole.
    return Side(1, (View(plan.devices[0], tensor.box, 0),))
