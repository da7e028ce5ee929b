"""Torch's ways to train, each with its options as values; all functions are collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from bench.machine.method import Method
from bench.training.workloads import Stage, Workload
from superscaler_core.simulator.measured import num_cores_here

Share = Callable[[Workload, nn.Module], Method]
"""From a workload and its model to this rank's method; the model is copied."""


@cache
def _mesh(*shape: int) -> DeviceMesh:
    """A mesh over all ranks; ranks with consecutive numbers are neighbours on its last axis."""
    names = ("outer", "inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _of_rows(module: Any, index: int, num: int) -> Method:
    """The method of a module that trains this part of the rows of a batch."""

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = module(*(x.chunk(num)[index] for x in batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Method.of(step, module.parameters())


@dataclass(frozen=True)
class One:
    """One process that trains the whole batch with these threads, while the others wait."""

    threads: int

    def __call__(self, _: Workload, model: nn.Module) -> Method:
        if dist.get_rank() > 0:
            return Method.of(lambda *batch: None, ())
        alone = _of_rows(deepcopy(model), 0, 1)

        def step(*batch: Tensor) -> Tensor | None:
            torch.set_num_threads(self.threads)
            try:
                return alone.step(*batch)
            finally:
                torch.set_num_threads(1)

        return replace(alone, step=step)


@dataclass(frozen=True)
class Ddp:
    """DistributedDataParallel, with buckets of this many MiB."""

    bucket_mib: int

    def __call__(self, _: Workload, model: nn.Module) -> Method:
        module = DistributedDataParallel(
            deepcopy(model), bucket_cap_mb=self.bucket_mib, gradient_as_bucket_view=True
        )
        return _of_rows(module, dist.get_rank(), dist.get_world_size())


@dataclass(frozen=True)
class Fsdp2:
    """``fully_shard``.

    Attributes:
        per_unit: blocks of a unit; 0 for a single unit.
        reshards: whether weights are sharded again after a forward.
        num_shards: ranks that share the weights; 0 for all.
    """

    per_unit: int
    reshards: bool
    num_shards: int = 0

    def __call__(self, workload: Workload, model: nn.Module) -> Method:
        module, size = deepcopy(model), dist.get_world_size()
        inner = self.num_shards or size
        mesh = _mesh(size) if inner == size else _mesh(size // inner, inner)
        blocks = [*workload.blocks_of(module)]
        for first in range(0, len(blocks) if self.per_unit else 0, self.per_unit or 1):
            unit: Any = blocks[first : first + self.per_unit]
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshards)
        fully_shard(module, mesh=mesh, reshard_after_forward=self.reshards)
        return _of_rows(module, dist.get_rank(), size)


@dataclass(frozen=True)
class Cut:
    """Blocks cut by DTensor over ``inner`` ranks; the other ranks are replicas under DDP."""

    inner: int
    bucket_mib: int = 25

    def __call__(self, workload: Workload, model: nn.Module) -> Method:
        num = dist.get_world_size() // self.inner
        mesh, module = _mesh(num, self.inner), deepcopy(model)
        assert workload.cut is not None
        for block in workload.blocks_of(module):
            workload.cut(block, mesh["inner"])
        if num == 1:
            return _of_rows(module, 0, 1)
        replicated = DistributedDataParallel(
            module, device_mesh=mesh["outer"], bucket_cap_mb=self.bucket_mib
        )
        return _of_rows(replicated, mesh.get_local_rank("outer"), num)


SCHEDULES: Mapping[str, tuple[Any, int]] = {
    "1F1B": (Schedule1F1B, 1),
    "GPipe": (ScheduleGPipe, 1),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2),
}
"""Schedules, and the chunks of the model on each rank."""


@dataclass(frozen=True)
class Pipelined:
    """torch.distributed.pipelining.

    Attributes:
        stages: groups of ranks, each with one stage or, if interleaved, some chunks.
        per_stage: microbatches of a step, as a multiple of the number of stages.
        schedule: a name of ``SCHEDULES``.
        cuts: whether the ranks of a stage cut its blocks by DTensor; if not, they share the rows of
            each microbatch under DDP.
    """

    stages: int
    per_stage: int
    schedule: str
    cuts: bool = False

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.stages * self.per_stage

    @property
    def chunks(self) -> int:
        """Chunks of the model on each rank."""
        return SCHEDULES[self.schedule][1]

    def __call__(self, workload: Workload, model: nn.Module) -> Method:
        pp, inner = self.stages, dist.get_world_size() // self.stages
        mesh, copied = _mesh(pp, inner), deepcopy(model)
        index, place = mesh.get_local_rank("outer"), mesh.get_local_rank("inner")
        if self.cuts:
            assert workload.cut is not None
            for block in workload.blocks_of(copied):
                workload.cut(block, mesh["inner"])
        num_stages, shares_rows = pp * self.chunks, inner > 1 and not self.cuts
        numbers = range(index, num_stages, pp)
        modules: list[nn.Module] = [Stage(workload, copied, i, num_stages) for i in numbers]
        if shares_rows:
            # Else DDP counts the gradients of every microbatch when it orders its buckets, and
            # ends with an assertion of its own.
            group = mesh.get_group("inner")
            modules = [
                DistributedDataParallel(each, process_group=group, find_unused_parameters=True)
                for each in modules
            ]
        cpu, outer = torch.device("cpu"), mesh.get_group("outer")
        stages = [
            PipelineStage(module, i, num_stages, cpu, group=outer)
            for module, i in zip(modules, numbers, strict=True)
        ]
        make, _ = SCHEDULES[self.schedule]
        schedule = make(
            stages if self.chunks > 1 else stages[0], self.microbatches, loss_fn=workload.loss
        )

        def mine(x: Tensor) -> Tensor:
            return x.chunk(inner)[place] if shares_rows else x

        def step(x: Tensor, targets: Tensor) -> Tensor | None:
            losses: list[Tensor] = []
            given = (mine(x),) if index == 0 else ()
            target = mine(targets) if index == pp - 1 else None
            schedule.step(*given, target=target, losses=losses, return_outputs=False)
            return torch.stack(losses).mean().detach() if losses else None

        return Method.of(step, [p for module in modules for p in module.parameters()])


# --- the options of each way --------------------------------------------------------------------

BUCKETS_MIB = (1, 4, 25, 100)
MICROBATCHES_PER_STAGE = (1, 2, 4)


def _degrees(num: int) -> list[int]:
    """The degrees above 1 that divide a number of ranks."""
    return [degree for degree in range(2, num + 1) if num % degree == 0]


def _fsdp2s(num: int, _: Workload) -> Iterator[Share]:
    for per_unit in (1, 2, 0):
        for reshards in (True, False):
            yield from (Fsdp2(per_unit, reshards, shards) for shards in (0, *_degrees(num)[:-1]))


def pipelines(num: int, workload: Workload) -> Iterator[Pipelined]:
    """All pipelines over ``num`` ranks whose chunks have a block, and whose ranks have a row."""
    num_blocks = workload.num_blocks
    for stages in (degree for degree in _degrees(num) if degree <= num_blocks):
        inner = num // stages
        for cuts in (False, True)[: 1 + (inner > 1 and workload.cut is not None)]:
            for per_stage in MICROBATCHES_PER_STAGE:
                rows, rest = divmod(workload.batch, stages * per_stage * (1 if cuts else inner))
                for schedule, (_, chunks) in SCHEDULES.items() if rows and not rest else ():
                    if stages * chunks <= num_blocks:
                        yield Pipelined(stages, per_stage, schedule, cuts)


def cuts(num: int, workload: Workload) -> Iterator[Cut]:
    """All degrees of tensor parallelism, if DTensor can cut the workload's blocks."""
    for inner in _degrees(num) if workload.cut else ():
        yield from (Cut(inner, mib) for mib in (BUCKETS_MIB if inner < num else BUCKETS_MIB[:1]))


WAYS: Mapping[str, Callable[[int, Workload], Iterator[Share]]] = {
    "one": lambda num, workload: map(One, sorted({1, num_cores_here()})),
    "ddp": lambda num, workload: map(Ddp, BUCKETS_MIB),
    "fsdp2": _fsdp2s,
    "pipeline": pipelines,
    "tensor": cuts,
}
"""From the number of ranks and a workload to the options of a way, by the way's name."""
