"""Ours: programs of a workload, by the plan of our search on this machine or by shipped plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import superscaler_core as ss
from bench.machine.machine import OPTIMIZER, Machine
from bench.machine.method import Method
from bench.training import torchs
from bench.training.planned import planned_bytes
from bench.training.workloads import Workload
from rvdcomm.calibration import Effort
from superscaler_core import Graph
from superscaler_core.front_end import capture
from superscaler_core.plan import Overlap
from superscaler_core.plans import PLANS

MESSAGES = " messages"
"""The suffix of a name: without shared memory."""

_EFFORT = Effort(secs=0.05, max_bytes=4 << 20)


@dataclass(frozen=True)
class Form:
    """A plan with its options.

    Attributes:
        plan: the name of a shipped plan; ``auto`` for the plan that a search finds.
        options: options of the plan, by name.
        overlap: what overlaps with computing.
        microbatches: microbatches of a step.
    """

    plan: str
    options: tuple[tuple[str, Any], ...] = ()
    overlap: Overlap = field(default_factory=Overlap)
    microbatches: int = 1

    def __str__(self) -> str:
        words = [self.plan, *(f"{name}={value}" for name, value in self.options)]
        return " ".join([*words, *([str(self.overlap)] if self.overlap != Overlap() else [])])

    def plan_of(self, graph: Graph, num_ranks: int) -> ss.Plan:
        """The filled plan of a microbatch's graph."""
        plan = ss.Plan(graph, range(num_ranks))
        PLANS[self.plan](plan, **dict(self.options))
        plan.overlap = self.overlap
        return plan


AUTO = Form("auto")


@dataclass(eq=False)
class Ours:
    """Programs of a workload on this machine; all methods are collective over the world.

    Attributes:
        workload, model: the workload and its model.
        batch: the inputs of a whole step.
        folder: folder of the programs, shared by all ranks.
        budget_secs: time budget of a search.
        about: description of the plan from the search, for people.
        planned_bytes: planned bytes that each rank sends in a step, by the text of a form; on the
            first rank, for programs without FSDP units.
    """

    workload: Workload
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    folder: Path
    budget_secs: float
    about: str = ""
    planned_bytes: dict[str, list[int]] = field(default_factory=dict)
    _prepared: set[Form] = field(default_factory=set)

    def __post_init__(self) -> None:
        _HERE[:] = [self]

    def __reduce__(self) -> tuple[Any, ...]:
        """Plans of a search may know its graphs; sent to another rank, they know those there."""
        return _here, ()

    def prepare(self, form: Form) -> None:
        """Compile a program and write it, unless that was done before."""
        if form in self._prepared:
            return
        self._prepared.add(form)
        topology = self._machine.topology
        # The search is collective; a shipped plan is compiled by the rank that writes it.
        made = self._found() if form == AUTO else None
        if dist.get_rank() == 0:
            made = made or self._shipped(form)
            made.save(self.folder / str(form))
            if not made.plan.fsdp_units:
                self.planned_bytes[str(form)] = planned_bytes(made, topology)
        dist.barrier()

    def share(self, form: Form, executor: str) -> Method:
        """The training method of this rank's part of a prepared program."""
        with _executor(executor):
            trainer = ss.load(self.folder / str(form))
            trainer.load_state_dict(self.model.state_dict())

        def step(*batch: Tensor) -> Tensor:
            with _executor(executor):
                return trainer.step(*batch)

        return Method.of(step, trainer.parameters())

    @cached_property
    def _machine(self) -> Machine:
        """The measured machine; all ranks measure it together when it is first needed."""
        return Machine(effort=_EFFORT, waits=self.workload.waits)

    @cache  # noqa: B019 - as long as the workload is trained
    def _graph(self, samples: int) -> Graph:
        return capture(self.model, tuple(x[:samples] for x in self.batch))

    def _shipped(self, form: Form) -> ss.Compiled:
        graph = self._graph(self.workload.batch // form.microbatches)
        plan = form.plan_of(graph, dist.get_world_size())
        return ss.compile(plan, topology=self._machine.topology, optimizer=OPTIMIZER)

    def _found(self) -> ss.Compiled:
        """The program of the plan that wins the race after a search."""
        machine, batch = self._machine, self.workload.batch
        found = machine.search(self._graph, batch, budget_secs=self.budget_secs)
        request = machine.request(self._graph, batch)
        best, *_ = machine.raced(found, request, self.model, self.batch)
        simulated, raced = 1e3 * best.secs, 1e3 * best.measured_secs
        self.about = f"{best.name}, {simulated:.1f} ms simulated, {raced:.1f} in the race"
        return best.compiled(request)


_HERE: list[Ours] = []
"""The programs of this process."""


def _here() -> Ours:
    return _HERE[0]


@contextmanager
def _executor(name: str) -> Iterator[None]:
    """Communicate by this executor, and then as before."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


_VARIABLE = "RVDCOMM_EXECUTOR"

# --- shipped plans, with the options that torch's ways have ---------------------------------------


def _reduced(*plans: str) -> Iterator[Form]:
    """Plans whose gradients are reduced after the backward, or during it in buckets."""
    for plan in plans:
        yield Form(plan)
        for mib in torchs.BUCKETS_MIB:
            yield Form(plan, overlap=Overlap(1, reductions=True, bucket_bytes=mib << 20))


def _pipelined(num: int, workload: Workload) -> Iterator[Form]:
    schedules = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
    for way in torchs.pipelines(num, workload):
        options = {
            "tp": num // way.stages if way.cuts else 1, "pp": way.stages, "chunks": way.chunks,
            "microbatches": way.microbatches, "schedule": schedules[way.schedule],
        }  # fmt: skip
        yield Form("hybrid", tuple(options.items()), microbatches=way.microbatches)


def _cut(num: int, workload: Workload) -> Iterator[Form]:
    for inner in dict.fromkeys(way.inner for way in torchs.cuts(num, workload)):
        options = (("tp", inner), ("pp", 1), ("microbatches", 1))
        yield Form("hybrid", options)
        yield Form("hybrid", options, Overlap(moves=True))
        if inner < num:
            for mib in torchs.BUCKETS_MIB:
                overlap = Overlap(moves=True, reductions=True, bucket_bytes=mib << 20)
                yield Form("hybrid", options, overlap)


FORMS: Mapping[str, Callable[[int, Workload], Iterator[Form]]] = {
    "auto": lambda num, workload: iter([AUTO]),
    "data_parallel": lambda num, workload: _reduced("data_parallel"),
    "zero3": lambda num, workload: _reduced("zero3", "zero2"),
    "pipelined": _pipelined,
    "megatron": _cut,
}
"""From the number of ranks and a workload to the forms of a plan, by the plan's name."""
