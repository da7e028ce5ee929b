"""Competitors: the ways to train a workload that are compared, each a value.

All functions are collective over the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from bench.machine.method import Method
from bench.training.ours import Ours
from bench.training.workloads import Stage, Workload

Share = Callable[[Workload, nn.Module, Ours], Method]
"""From a workload, its model and our programs to this rank's share; the model is copied."""


def _nothing(_: Ours) -> None:
    """Torch's ways need no program."""


@dataclass(frozen=True)
class Competitor:
    """A way to train.

    Attributes:
        name: for people.
        share: wraps the model, and says how to step.
        prepare: what comes before it, and is not of its memory.
    """

    name: str
    share: Share
    prepare: Callable[[Ours], None] = _nothing


def _ours(name: str, _: Workload, __: nn.Module, ours: Ours) -> Method:
    return ours.share(name)


# --- every rank has its rows of a batch -----------------------------------------------------------


def _of_rows(module: Any) -> Method:
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = module(*(x.chunk(size)[rank] for x in batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Method.of(step, module.parameters())


def _ddp(_: Workload, model: nn.Module, __: Ours) -> Method:
    return _of_rows(DistributedDataParallel(deepcopy(model)))


def _fsdp2(workload: Workload, model: nn.Module, _: Ours) -> Method:
    module = deepcopy(model)
    for block in workload.blocks_of(module):
        fully_shard(block)
    fully_shard(module)
    return _of_rows(module)


# --- stages, of ranks that share layers or rows ---------------------------------------------------

MICROBATCHES_OF_A_STAGE = 2
"""Of a step, for every stage of a pipeline."""


@dataclass(frozen=True)
class Grid:
    """``torch.distributed.pipelining`` of some stages; ranks of a stage cut its blocks by DTensor.

    Blocks that DTensor cannot cut are replicated instead, and the ranks of a stage share the rows
    of every microbatch, by DDP.

    Attributes:
        num_stages: one stage runs without microbatches.
    """

    num_stages: int

    def __call__(self, workload: Workload, model: nn.Module, _: Ours) -> Method:
        pp, inner = self.num_stages, dist.get_world_size() // self.num_stages
        mesh = init_device_mesh("cpu", (pp, inner), mesh_dim_names=("pp", "inner"))
        index, place = mesh.get_local_rank("pp"), mesh.get_local_rank("inner")
        copied = deepcopy(model)
        if workload.cut is not None and inner > 1:
            for block in workload.blocks_of(copied):
                workload.cut(block, mesh["inner"])
        stage: nn.Module = Stage(workload, copied, index, pp)
        shares_rows = workload.cut is None and inner > 1
        if shares_rows:
            stage = DistributedDataParallel(stage, process_group=mesh.get_group("inner"))

        def mine(x: Tensor) -> Tensor:
            return x.chunk(inner)[place] if shares_rows else x

        if pp == 1:

            def step(x: Tensor, targets: Tensor) -> Tensor | None:
                loss = workload.loss(stage(mine(x)), mine(targets))
                loss.backward()  # type: ignore[no-untyped-call]
                return loss.detach()

        else:
            piped = PipelineStage(stage, index, pp, torch.device("cpu"), group=mesh.get_group("pp"))
            schedule = Schedule1F1B(piped, MICROBATCHES_OF_A_STAGE * pp, loss_fn=workload.loss)

            def step(x: Tensor, targets: Tensor) -> Tensor | None:
                losses: list[Tensor] = []
                given = (mine(x),) if index == 0 else ()
                target = mine(targets) if index == pp - 1 else None
                schedule.step(*given, target=target, losses=losses, return_outputs=False)
                return torch.stack(losses).mean().detach() if losses else None

        return Method.of(step, stage.parameters())


_TORCHS: Mapping[str, Share] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "pipeline": Grid(2),
    "tensor": Grid(1),
}


def competitors(
    workload: Workload, plans: Sequence[str], against: Sequence[str]
) -> Mapping[str, Competitor]:
    """Those by which a workload can be trained, by name.

    Args:
        workload: what is trained.
        plans: ours, as ``Ours`` knows them.
        against: torch's; one stage alone is left out where DTensor cannot cut blocks.
    """
    found = [Competitor(name, partial(_ours, name), partial(Ours.prepare, name=name))
             for name in plans]  # fmt: skip
    found += [
        Competitor(name, _TORCHS[name])
        for name in against
        if name != "tensor" or workload.cut is not None
    ]
    return {each.name: each for each in found}
