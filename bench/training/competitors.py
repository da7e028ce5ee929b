"""Competitors: the training methods that are compared, each as a value.

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
"""From a workload, its model and our programs to this rank's method; the model is copied."""


def _nothing(_: Ours) -> None:
    """Do nothing: torch's methods need no program."""


@dataclass(frozen=True)
class Competitor:
    """A training method that is compared.

    Attributes:
        name: name for people.
        share: makes the training method of this rank.
        prepare: runs before ``share``; its memory is not counted.
    """

    name: str
    share: Share
    prepare: Callable[[Ours], None] = _nothing


def _ours(name: str, _: Workload, __: nn.Module, ours: Ours) -> Method:
    return ours.share(name)


# --- methods in which each rank takes its rows of a batch -----------------------------------------


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


# --- stages, whose ranks share layers or rows -----------------------------------------------------

MICROBATCHES_OF_A_STAGE = 2
"""Microbatches per step, as a multiple of the number of stages."""


@dataclass(frozen=True)
class Grid:
    """Pipelining of torch; the ranks of each stage split its blocks with DTensor.

    Blocks that DTensor cannot split are replicated. The ranks of a stage then share the rows of
    each microbatch, with DDP.

    Attributes:
        num_stages: number of stages; one stage runs without pipeline and microbatches.
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
    """The competitors that can train a workload, by name.

    Args:
        workload: the model and its data.
        plans: names of our plans, as in ``Ours.prepare``.
        against: names of torch's methods; ``tensor`` is left out if DTensor cannot split blocks.
    """
    found = [Competitor(name, partial(_ours, name), partial(Ours.prepare, name=name))
             for name in plans]  # fmt: skip
    found += [
        Competitor(name, _TORCHS[name])
        for name in against
        if name != "tensor" or workload.cut is not None
    ]
    return {each.name: each for each in found}
