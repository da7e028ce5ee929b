"""Weights: where each parameter is stored and used, and how its gradient returns to storage.

A parameter is stored where the parts of its optimizer op are assigned; without such a decision,
every device stores what it reads. A *use* is a set of ops that share one copy of the parameter per
device: either all ops outside FSDP units, or the ops of one FSDP unit (``Plan.unshard``,
``Plan.reduce_grads``). Ops that give partial sums of its gradient, and ops that give the whole
gradient (such as the square of a weight in the loss), are separate uses.

In an asynchronous pipeline stages update at different times. A parameter that several stages read
belongs to the first of them, its *owner*; the others *borrow* it, each by a use of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from superscaler_core.graph.graph import Op
from superscaler_core.graph.once import known_of
from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.materialize.edges import (
    Edges,
    Reader,
    input_sharding,
    output_sharding,
    stages_by_op,
)
from superscaler_core.materialize.sharding import HeldBox, Sharding
from superscaler_core.materialize.transfer import Transfer, transfers
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.savings import FsdpUnit

MAX_USES = 1 << 14
"""Bound on cached uses of the parameters of a graph, by parameter and the splits of its readers."""


@dataclass(frozen=True, eq=False)
class Use:
    """A parameter as one set of ops reads it.

    Plans of one graph share the uses that are equal in them, so uses are compared by identity.

    Attributes:
        number: number among the uses of the parameter.
        tensor: the parameter.
        storage: the end where it is stored.
        sharding: the end where it is read; its summands are those of the gradient.
        readers: the ops.
        is_trained: whether the ops give the parameter a gradient.
        unit: the FSDP unit of the ops; None if the copy exists all the time.
        owner: for a borrowed parameter, the stage that updates it; otherwise None.
    """

    number: int
    tensor: PTensor
    storage: Sharding
    sharding: Sharding
    readers: tuple[Reader, ...]
    is_trained: bool
    unit: FsdpUnit | None
    owner: int | None = None

    @property
    def name(self) -> str:
        """The name in generated code: the parameter's, with the number if it has several uses."""
        return self.tensor.name + (f"#{self.number}" if self.number else "")

    @property
    def is_fetched(self) -> bool:
        """Whether the weight is gathered for its FSDP unit, and dropped after it."""
        return self.unit is not None and self.unit.unshards

    @cached_property
    def is_stored(self) -> bool:
        """Whether every device that reads the parameter stores exactly what it reads."""
        return not self.is_fetched and all(
            device in self.storage.shards and self.storage.shards[device].box == shard.box
            for device, shard in self.sharding.shards.items()
        )

    @cached_property
    def fetch(self) -> tuple[Transfer, ...]:
        """The transfers from storage to the readers; empty if every reader stores the weight."""
        if self.is_stored:
            return ()
        return transfers(self.storage, self.sharding.whole, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def reduce(self) -> tuple[Transfer, ...]:
        """The transfers of the gradient to storage; empty if the readers give no gradient."""
        if not self.is_trained:
            return ()
        return transfers(self.sharding, self.storage, self.tensor.shape, self.tensor.dtype)

    @cached_property
    def is_brought(self) -> bool:
        """Whether reading the weight needs communication."""
        return any(not sub_transfer.is_idle for sub_transfer in self.fetch)

    @cached_property
    def is_reduced(self) -> bool:
        """Whether reducing the gradient needs communication."""
        return any(not sub_transfer.is_idle for sub_transfer in self.reduce)

    @cached_property
    def most_bytes(self) -> int:
        """The bytes on the device that reads most of the weight."""
        return max(self.sharding.num_elements.values()) * ITEM_BYTES[self.tensor.dtype]


@dataclass(frozen=True, eq=False)
class Weights:
    """The storage and the uses of all parameters of a plan."""

    storage: Mapping[PTensor, Sharding]
    uses: tuple[Use, ...]

    @cached_property
    def of_unit(self) -> Mapping[FsdpUnit | None, tuple[Use, ...]]:
        """The uses of weights, by FSDP unit."""
        found: dict[FsdpUnit | None, tuple[Use, ...]] = {}
        for use in self.uses:
            found[use.unit] = (*found.get(use.unit, ()), use)
        return found

    @cached_property
    def of_reader(self) -> Mapping[Reader, Use]:
        """The use from which each reader reads."""
        return {reader: use for use in self.uses for reader in use.readers}


def find_weights(plan: Plan, edges: Edges) -> Weights:
    """Find where all parameters are stored and used."""
    unit_of: dict[Op, FsdpUnit] = {op: w for w in plan.fsdp_units for op in w.ops}
    has_updates = plan.schedule is not None and plan.schedule.weights is not None
    stage_of = stages_by_op(plan) if has_updates else {}
    uses: list[Use] = []
    storage: dict[PTensor, Sharding] = {}
    known = known_of(plan.graph, "uses", MAX_USES)
    chosen = {
        op: (
            plan.op_split(op), unit_of.get(op), stage_of.get(op.index),
            tuple(edges.deferred[op].items()) if op in edges.deferred else None,
        )
        for op in plan.graph.ops if op.parameters
    }  # fmt: skip
    readers = plan.graph.readers
    for name, tensor in plan.graph.parameters.items():
        update = plan.graph.updates[name]
        stored = plan.op_split(update) if plan.has_parts(update) else plan.devices[0]
        key = tensor, stored, *((chosen[op], i) for op, i in readers.get(tensor, ()))
        find = partial(_uses_of, plan, edges.deferred, tensor, unit_of, stage_of)
        storage[tensor], found = known.of(key, find)
        uses += found
    return Weights(storage, tuple(uses))


def _uses_of(
    plan: Plan,
    deferred: Mapping[Op, Mapping[Device, int]],
    tensor: PTensor,
    unit_of: Mapping[Op, FsdpUnit],
    stage_of: Mapping[int, int],
) -> tuple[Sharding, tuple[Use, ...]]:
    """Where one parameter is stored, and its uses.

    Args:
        plan: the decisions.
        deferred: as in ``Edges``.
        tensor: the parameter.
        unit_of: the FSDP units of ops that are in one.
        stage_of: in an asynchronous pipeline, the stage of every op, by the op's index.
    """
    readers = plan.graph.readers.get(tensor, ())
    stages = {stage_of.get(op.index) for op, _ in readers} if tensor.requires_grad else set()
    owner = min((stage for stage in stages if stage is not None), default=None)
    groups: dict[tuple[FsdpUnit | None, bool, int | None], list[Reader]] = {}
    for reader in readers:
        # A device that added a partial sum to a whole gradient could pass on neither of the two.
        is_summed = _read_by(plan, deferred, *reader).num_summands > 1
        stage = stage_of.get(reader[0].index)
        borrower = None if owner is None or stage == owner else stage
        key = unit_of.get(reader[0]), is_summed, borrower
        groups.setdefault(key, []).append(reader)
    shardings = [
        Sharding.joined(_read_by(plan, deferred, *reader) for reader in group)
        for group in groups.values()
    ]
    storage = _storage(plan, tensor, shardings)
    found: list[Use] = []
    for ((unit, _, borrower), group), sharding in zip(groups.items(), shardings, strict=True):
        gives_grad = any(op in plan.graph.ops_with_backward for op, _ in group)
        is_trained = tensor.requires_grad and gives_grad
        of = None if borrower is None else owner
        found.append(Use(len(found), tensor, storage, sharding, tuple(group), is_trained, unit, of))
    return storage, tuple(found)


def _read_by(
    plan: Plan, deferred: Mapping[Op, Mapping[Device, int]], op: Op, position: int
) -> Sharding:
    """The end at which an op reads a parameter."""
    sharding = input_sharding(plan, op, position)
    shares = deferred.get(op)
    return sharding if shares is None else shared(sharding, shares)


def shared(sharding: Sharding, shares: Mapping[Device, int]) -> Sharding:
    """The end at which replicas read a parameter if each returns a share of its gradient."""
    views = {HeldBox(view.device, view.box, shares[view.device]) for view in sharding.views}
    return Sharding(1 + max(shares.values()), tuple(sorted(views)))


def _storage(
    plan: Plan,
    tensor: PTensor,
    shardings: Sequence[Sharding],
) -> Sharding:
    op = plan.update(tensor.name)
    if plan.has_parts(op):
        return output_sharding(plan, op, 0)
    if shardings:
        return Sharding.joined(shardings).resident
    # No op reads it: the first device stores it, so that a checkpoint is complete.
    return Sharding(1, (HeldBox(plan.devices[0], tensor.box, 0),))
