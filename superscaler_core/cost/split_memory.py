"""SplitMemory: the memory of an op on the device where it takes the most, by its split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from superscaler_core.cost.memory_cost import MemoryCost, recomputed
from superscaler_core.cost.op_memory import Kept, op_memory
from superscaler_core.cost.prices import MAX_PRICES
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ITEM_BYTES, PARAMETER
from superscaler_core.known import ByKey, remembers
from superscaler_core.materialize.sharding import Sharding, shardings_of
from superscaler_core.memory import STATES
from superscaler_core.plan import Device, OpSplit
from superscaler_core.precision import Precision


@dataclass(frozen=True, eq=False)
class SplitMemory:
    """Memory of ops; ops of equal forms share results.

    Attributes:
        updates: for each parameter, by name, the op that updates it.
        optimizer, precision: as in ``CostModel``.
    """

    updates: Mapping[str, Op]
    optimizer: str
    precision: Precision

    def of(
        self, op: Op, split: OpSplit, keep: Kept, storage: tuple[OpSplit | None, ...]
    ) -> MemoryCost:
        """As ``CostModel.memory_cost``, given the storage of every parameter that the op reads."""
        return self._of(ByKey(op.form, op), split, keep, storage)

    @remembers(MAX_PRICES)
    def _of(
        self, of: ByKey[Op], split: OpSplit, keep: Kept, storage: tuple[OpSplit | None, ...]
    ) -> MemoryCost:
        op, parts = of.value, dict[Device, list[Part]]()
        for placed in split.parts:
            assert placed.device is not None, f"{split}: every part has a device"
            parts.setdefault(placed.device, []).append(Part(op, placed.pieces, placed.replica))
        found = [self._on_device(mine, device, storage) for device, mine in parts.items()]
        most = max(found, key=lambda cost: (cost.resting_bytes + cost.grads_bytes + cost.kept_bytes,
                                            cost.first_backward_bytes))  # fmt: skip
        if keep is Kept.SAVED:
            return most
        again = replace(recomputed([most]), views=most.views)
        return again if keep is Kept.INPUTS else replace(again, kept_bytes=0)

    def _on_device(
        self, parts: Sequence[Part], device: Device, storage: Sequence[OpSplit | None]
    ) -> MemoryCost:
        """The memory of one op's parts on one device, which run one after another."""
        op = parts[0].op
        ran = [op_memory(part) for part in parts]
        weights = grads = stored_bytes = 0
        for i, where in zip(weights_of(op.form), storage, strict=True):
            of = op.inputs[i]
            item_bytes = self.precision.item_bytes(of.dtype)
            read = Sharding.of((0, *part.form.inputs[i]) for part in parts).num_elements[0]
            mine = (
                read
                if where is None
                else shardings_of(self.updates[of.name].form, where)
                .outputs[0]
                .num_elements.get(device, 0)
            )
            is_own = mine == read and item_bytes == ITEM_BYTES[of.dtype]
            weights += mine * item_bytes + (0 if is_own else read * ITEM_BYTES[of.dtype])
            if of.requires_grad:
                grads += read * item_bytes
                stored_bytes += mine * item_bytes
        kept = sum(each.kept_bytes for each in ran)
        others = [kept - each.kept_bytes for each in ran]
        pairs = list(zip(ran, others, strict=True))
        return MemoryCost(
            weights, grads, STATES[self.optimizer] * stored_bytes, kept,
            sum(each.input_bytes for each in ran),
            max(each.forward_bytes + other for each, other in pairs),
            max(each.backward_bytes + other for each, other in pairs),
            max(each.first_backward_bytes + other for each, other in pairs),
            ran[0].saved if len(ran) == 1 else (),
            ran[0].views if len(ran) == 1 else (None,) * len(op.outputs),
        )  # fmt: skip


def weights_of(form: OpForm) -> list[int]:
    """The positions of an op's inputs that are parameters."""
    return [i for i, of in enumerate(form.inputs) if of.kind == PARAMETER]
