"""Ours: the plan that our search finds for a workload on this machine, and plans by their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from bench.superscaler_predict_worker import measured_move_secs
from bench.training.planned import planned_bytes
from bench.training.workloads import Workload
from bench.training_method import Method
from rvdcomm.calibration import Effort, calibrate
from superscaler_core.front_end import capture
from superscaler_core.plan import Overlap
from superscaler_core.plans import PLANS
from superscaler_core.simulator import DeviceProfile
from superscaler_core.simulator.measured import measured

AUTO, MESSAGES, OVERLAPPED = "auto", " messages", "+"
"""The plan that is found; ends of names: ranks do not share memory, and plans overlap."""

MEMORY_BYTES = 1 << 30
"""Of a rank, which no plan of these models needs."""

_EFFORT = Effort(secs=0.05, max_bytes=4 << 20)
_OPTIMIZER = "momentum"
_OVERLAP = Overlap(1, reductions=True, bucket_bytes=4 << 20)

_MEASURED = (("data_parallel", 1), ("data_parallel", 4), ("megatron", 1), ("megatron", 4))
"""Plans, and into how many microbatches they cut a batch; their ops are measured."""


@dataclass
class Ours:
    """Programs of a workload on this machine. All methods are collective over the world.

    Attributes:
        workload, model: what is trained.
        batch: a whole one.
        folder: of programs, shared by all ranks.
        budget_secs: of a search.
        about: what was found, for people; on the first rank.
        planned_bytes: what ranks send in a step, by program, where weights are in no windows.
    """

    workload: Workload
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    folder: Path
    budget_secs: float
    about: dict[str, str] = field(default_factory=dict)
    planned_bytes: dict[str, list[int]] = field(default_factory=dict)
    _compiled: dict[str, ss.Compiled] = field(default_factory=dict)

    def prepare(self, name: str) -> None:
        """Write a program.

        Args:
            name: ``AUTO`` or a shipped plan, with ``OVERLAPPED`` and ``MESSAGES`` behind it or not.
        """
        plan = name.removesuffix(MESSAGES)
        _ = self.profile if plan == AUTO else self.topology
        if dist.get_rank() == 0:
            if plan not in self._compiled:
                self._compiled[plan] = self._found() if plan == AUTO else self._shipped(plan)
                self._compiled[plan].save(self.folder / plan)
            if not self._compiled[plan].plan.windows:
                self.planned_bytes[name] = planned_bytes(self._compiled[plan], self.topology)
        dist.barrier()

    def share(self, name: str) -> Method:
        """This rank's share of a program that was prepared."""
        executor = "dist" if name.endswith(MESSAGES) else "auto"
        os.environ["RVDCOMM_EXECUTOR"] = executor
        trainer = ss.load(self.folder / name.removesuffix(MESSAGES))
        trainer.load_state_dict(self.model.state_dict())

        def step(*batch: Tensor) -> Tensor:
            os.environ["RVDCOMM_EXECUTOR"] = executor
            return trainer.step(*batch)

        return Method.of(step, trainer.parameters())

    @cached_property
    def topology(self) -> rv.Topology:
        """The links between ranks, measured, on all ranks together."""
        return calibrate(effort=_EFFORT)[0]

    @cached_property
    def profile(self) -> DeviceProfile:
        """The speed of a rank, measured; all ranks share the cores of this machine."""
        found = measured(self._programs(), move_secs=measured_move_secs(self.topology))
        return replace(found, num_cores=os.cpu_count() or 0)

    def _programs(self) -> Iterator[ss.Compiled]:
        for name, num in _MEASURED:
            plan = self._plan(name, num)
            yield ss.compile(plan, topology=self.topology, optimizer=_OPTIMIZER)

    def _plan(self, name: str, microbatches: int = 1) -> ss.Plan:
        """A shipped plan of a microbatch, of which a batch has so many."""
        part = tuple(x[: len(x) // microbatches] for x in self.batch)
        plan = ss.Plan(capture(self.model, part), range(dist.get_world_size()))
        PLANS[name](plan)
        return plan

    def _shipped(self, name: str) -> ss.Compiled:
        shipped = name.removesuffix(OVERLAPPED)
        plan = self._plan(shipped)
        if plan.num_microbatches > 1:
            plan = self._plan(shipped, plan.num_microbatches)
        if name.endswith(OVERLAPPED):
            plan.overlap = _OVERLAP
        return ss.compile(plan, topology=self.topology, optimizer=_OPTIMIZER)

    def _found(self) -> ss.Compiled:
        found = ss.search(
            self.model,
            self.batch,
            topology=self.topology,
            batch=self.workload.batch,
            memory_bytes=MEMORY_BYTES,
            budget_secs=self.budget_secs,
            profile=self.profile,
            optimizer=_OPTIMIZER,
        )
        self.about[AUTO] = f"{found.name}, {1e3 * found.secs:.1f} ms simulated"
        return ss.compile(found.plan, topology=self.topology, optimizer=_OPTIMIZER)
