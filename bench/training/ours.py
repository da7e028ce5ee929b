"""Ours: programs of a workload, by the plan of our search on this machine or by a named plan."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

import superscaler_core as ss
from bench.machine.machine import OPTIMIZER, Machine
from bench.machine.method import Method
from bench.training.planned import planned_bytes
from bench.training.workloads import Workload
from rvdcomm.calibration import Effort
from superscaler_core import Graph
from superscaler_core.front_end import capture
from superscaler_core.plan import Overlap
from superscaler_core.plans import PLANS

AUTO, MESSAGES, OVERLAPPED = "auto", " messages", "+"
"""The name of the plan from the search, and suffixes: without shared memory, and with overlap."""

_EFFORT = Effort(secs=0.05, max_bytes=4 << 20)
_OVERLAP = Overlap(1, reductions=True, bucket_bytes=4 << 20)


@dataclass(eq=False)
class Ours:
    """Programs of a workload on this machine; all methods are collective over the world.

    Attributes:
        workload, model: the workload and its model.
        batch: the inputs of a whole step.
        folder: folder of the programs, shared by all ranks.
        budget_secs: time budget of a search.
        about: description of the plan from the search, for people.
        planned_bytes: planned bytes that each rank sends in a step, by program; on the first rank,
            for programs whose weights are in no windows.
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
        """Compile a program, and write it on the first rank.

        Args:
            name: ``AUTO``, or the name of a shipped plan, which may end in ``OVERLAPPED``. Each
                name may have ``MESSAGES`` at its end.
        """
        plan = name.removesuffix(MESSAGES)
        if plan not in self._compiled:
            self._compiled[plan] = self._found() if plan == AUTO else self._shipped(plan)
        made = self._compiled[plan]
        if dist.get_rank() == 0:
            made.save(self.folder / plan)
            if not made.plan.fsdp_units:
                self.planned_bytes[name] = planned_bytes(made, self._machine.topology)
        dist.barrier()

    def share(self, name: str) -> Method:
        """The training method of this rank's part of a prepared program."""
        executor = "dist" if name.endswith(MESSAGES) else "auto"
        os.environ["RVDCOMM_EXECUTOR"] = executor
        trainer = ss.load(self.folder / name.removesuffix(MESSAGES))
        trainer.load_state_dict(self.model.state_dict())

        def step(*batch: Tensor) -> Tensor:
            os.environ["RVDCOMM_EXECUTOR"] = executor
            return trainer.step(*batch)

        return Method.of(step, trainer.parameters())

    @cached_property
    def _machine(self) -> Machine:
        """The measured machine; all ranks measure it together when it is first needed."""
        return Machine(effort=_EFFORT)

    @cache  # noqa: B019 - as long as the workload is trained
    def _graph(self, samples: int) -> Graph:
        return capture(self.model, tuple(x[:samples] for x in self.batch))

    def _shipped(self, name: str) -> ss.Compiled:
        shipped = name.removesuffix(OVERLAPPED)
        plan = self._plan(shipped)
        if plan.num_microbatches > 1:
            plan = self._plan(shipped, plan.num_microbatches)
        if name.endswith(OVERLAPPED):
            plan.overlap = _OVERLAP
        return ss.compile(plan, topology=self._machine.topology, optimizer=OPTIMIZER)

    def _plan(self, name: str, microbatches: int = 1) -> ss.Plan:
        """A shipped plan of one of ``microbatches`` equal microbatches of the batch."""
        samples = self.workload.batch // microbatches
        plan = ss.Plan(self._graph(samples), range(dist.get_world_size()))
        PLANS[name](plan)
        return plan

    def _found(self) -> ss.Compiled:
        """The program of the plan that wins the race after a search."""
        machine, batch = self._machine, self.workload.batch
        found = machine.search(self._graph, batch, budget_secs=self.budget_secs)
        request = machine.request(self._graph, batch)
        best, *_ = machine.raced(found, request, self.model, self.batch)
        simulated, raced = 1e3 * best.secs, 1e3 * best.measured_secs
        self.about[AUTO] = f"{best.name}, {simulated:.1f} ms simulated, {raced:.1f} in the race"
        return best.compiled(request)
