"""State: where a plan keeps the buffers that a forward replaces, such as running statistics."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, OpSplit, Plan


def with_state(plan: Plan) -> Plan:
    """The plan, with every new value of a buffer on all devices that read the buffer.

    Every microbatch reads the value that the one before has left, on the device that reads it.

    Raises:
        PlanError: a buffer is read in another stage than the one that replaces it, or stages run on
            several workers, so that no worker sees all microbatches.
    """
    state = plan.graph.state
    if state and plan.num_routes > 1:
        raise PlanError(
            f"{plan.graph.name} replaces buffers in its forward ({next(iter(state)).name}), and "
            "every microbatch needs what the one before left: each stage has to be on one worker, "
            f"and the {plan.num_routes} routes of this schedule are on several."
        )
    changed = {}
    for buffer, kept in state.items():
        op = plan.graph.producer[kept]
        devices = _devices(plan, buffer, op)
        if devices != _devices_of(plan, op):
            changed[op] = OpSplit.of(((), number, d) for number, d in enumerate(devices))
    return plan.with_splits(changed) if changed else plan


def _devices(plan: Plan, buffer: PTensor, op: Op) -> tuple[Device, ...]:
    """The devices that read a buffer; if none does, the devices that replace it."""
    readers = [reader for reader, _ in plan.graph.readers.get(buffer, ())]
    stage = next(stage for stage in plan.stages if op in stage.ops)
    outside = [reader for reader in readers if reader not in stage.ops]
    if outside:
        raise PlanError(
            f"{op.name} replaces buffer {buffer.name!r} in stage {stage.index}, and "
            f"{outside[0].name} reads it in another stage; put both into one."
        )
    return tuple(sorted({d for reader in readers or [op] for d in _devices_of(plan, reader)}))


def _devices_of(plan: Plan, op: Op) -> tuple[Device, ...]:
    parts = plan.op_split(op).parts
    return tuple(sorted({part.device for part in parts if part.device is not None}))
