"""What vLLM's own engines would bring to a worker, by their rules (vLLM 0.32).

``nccl_m2n``: vLLM's own function says which tensors of the checkpoint it writes into parameters of
the same name; of these a worker gets its shard, and all others come whole.

``sharded_rdt``: a worker pulls the slices that its loaders read; before that, each trainer gathers
all tensors whole (``ModuleSource``), of which it has its shards already.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rvdcomm.interop.vllm import private


def bytes_into(worker: Any) -> dict[str, int]:
    """Bytes of one update into a worker of vLLM, by engine."""
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    engine = worker.weight_transfer_engine
    receiver = engine._receiver
    metas = {name: offer.meta for name, offer in receiver.transfer.offers.items()}
    tp = engine.parallel_config.tensor_parallel_size
    # Parameters of CPUs are packed for kernels after loading; the rule is for those of loaders.
    with private.without_data(engine.model):
        found = resolve_parameter_destinations(
            engine.model, list(metas), [m.dtype for m in metas.values()],
            [m.shape for m in metas.values()], num_workers=tp, shard_axis_size=tp,
            allow_direct=True,
        )  # fmt: skip
    m2n = 0
    for (shape, dtype), destination in zip(metas.values(), found, strict=True):
        is_cut = destination.direct and destination.placements is not None
        m2n += prod(shape) * dtype.itemsize // (tp if is_cut else 1)
    rdt = sum(
        box.num_elements * metas[name].dtype.itemsize
        for name in receiver.record.copies
        for box in receiver.record.boxes(name)
    )
    return {"nccl_m2n": m2n, "sharded_rdt": rdt}


def gathered_bytes(model_bytes: int, num_trainers: int) -> int:
    """Bytes that each trainer of FSDP2 receives before ``sharded_rdt`` serves an update."""
    return model_bytes * (num_trainers - 1) // num_trainers
