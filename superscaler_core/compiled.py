"""Compile: from an sProgram's decisions to a program that ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.checks import one_of
from superscaler_core.codegen import functions_of, rank_files, rank_text, tables_of
from superscaler_core.errors import PlanError
from superscaler_core.graph.without_grad import check_loss
from superscaler_core.levels import levels_of
from superscaler_core.materialize.materialized import Materialized, materialize
from superscaler_core.memory import (
    STATES,
    DeviceMemory,
    StepPeaks,
    check_memory,
    memory_of,
    step_peaks_of,
)
from superscaler_core.ops.modules import save_modules
from superscaler_core.plan import Plan, check_assigned, check_coverage, check_placement
from superscaler_core.precision import Precision, former_precision
from superscaler_core.program.step_program import StepProgram
from superscaler_core.report import Report, report_of
from superscaler_core.run.execute import Executor
from superscaler_core.run.program_folder import TOPOLOGY, WEIGHTS, save_constants, saving
from superscaler_core.training.checkpoint import save_weights


@dataclass(frozen=True, eq=False)
class Compiled:
    """A plan, validated and materialized.

    Attributes:
        materialized: the plan with its communication and its step program.
        optimizer: the optimizer of the training, by its name in ``memory.STATES``.
        precision: the dtypes of the training.
    """

    materialized: Materialized
    optimizer: str = "adam"
    precision: Precision = Precision()

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, STATES)
        Precision.of(self.precision)

    @cached_property
    def plan(self) -> Plan:
        """A copy of the sProgram's decisions; what is done to it does not change the program."""
        return (self.materialized.decided or self.materialized.plan).with_splits({})

    @property
    def step_program(self) -> StepProgram:
        """All instructions of all devices in a step, in one order; print it to read them."""
        return self.materialized.step_program

    def with_program(self, program: StepProgram) -> Compiled:
        """The plan with another step program: one that was rewritten, or read from its text.

        Raises:
            PlanError: the program cannot run, or is not of this plan.
        """
        made = self.materialized.with_program(program)
        return Compiled(made, self.optimizer, self.precision)

    @cached_property
    def memory(self) -> Mapping[int, DeviceMemory]:
        """The memory that every device needs."""
        return memory_of(self.materialized, optimizer=self.optimizer, precision=self.precision)

    @cached_property
    def step_peaks(self) -> Mapping[int, StepPeaks]:
        """The memory that every device needs at every step of its runs."""
        return step_peaks_of(self.materialized, optimizer=self.optimizer, precision=self.precision)

    def report(self, topology: rv.Topology | rv.Network | None = None) -> Report:
        """All communication and memory in tables; print it.

        Args:
            topology: price the plan on this topology; the one that it was compiled for if None.
        """
        levels = levels_of(topology) or self.materialized.topology
        return report_of(self.materialized, self.plan, self.memory, levels, self.precision)

    def summary(self) -> str:
        """The plan in a few lines."""
        return self.report().summary()

    @cached_property
    def files(self) -> Mapping[int, str]:
        """The generated Python text of every rank."""
        return rank_files(self.materialized)

    def file(self, rank: int) -> str:
        """The generated Python text of one rank."""
        return rank_text(self.materialized, rank)

    def executor(self, rank: int) -> Executor:
        """What runs the step program on one rank."""
        made = self.materialized
        return Executor(made, rank, functions_of(made, rank), tables_of(made, rank))

    @property
    def values(self) -> dict[str, Tensor]:
        """The model's constants and buffers, by name.

        They are the tensors of the captured graph; copy one before you change it.

        Raises:
            PlanError: a buffer that the model reads was on the meta device, so it has no value.
        """
        graph = self.plan.graph
        if graph.valueless:
            raise PlanError(
                f"{graph.name} was captured without values of its buffers "
                f"{', '.join(sorted(graph.valueless))}, which are on the meta device: it can be "
                "planned and simulated. To run it, build those modules on the CPU."
            )
        return {**graph.constants, **graph.buffers}

    def save(self, folder: str | Path, *, weights: bool = True) -> Path:
        """Write ``rank_0.py``, ..., the model's constants and the topology; return the folder.

        A program that is in the folder is replaced as a whole or, if the save fails, not at all.

        Args:
            folder: created if missing.
            weights: whether to write the captured model's parameters too, with their present
                values, so that trainers start from them; each rank reads its part. A model on the
                meta device has no values to write.

        Raises:
            PlanError: a buffer that the model reads was on the meta device, so it has no value.
            OSError: a file cannot be written.
        """
        values, files, graph = self.values, self.files, self.plan.graph
        with saving(folder) as new:
            for device, text in files.items():
                (new / f"rank_{device}.py").write_text(text)
            save_constants(new, values)
            if weights and graph.weights:
                save_weights(new / WEIGHTS, {**graph.weights, **graph.buffers})
            save_modules(new, {key for op in graph.ops for key in op.modules})
            if self.materialized.topology is not None:
                self.materialized.topology.save(new / TOPOLOGY)
        return Path(folder)


@paused_collector()
def compile(
    plan: Plan,
    *,
    topology: rv.Topology | rv.Network | None = None,
    memory_limit: int | None = None,
    optimizer: str = "adam",
    precision: Precision = Precision(),
    master_dtype: torch.dtype | str | None = None,
) -> Compiled:
    """Validate and materialize a plan.

    Args:
        plan: every part has a device.
        topology: hosts, links and their speeds, or a network, by the levels that resemble it; one
            host with fast links if None. It is saved with the program, and communication is planned
            for it.
        memory_limit: bytes of memory that each device has; not checked if None.
        optimizer: the optimizer of the training: "sgd", "momentum", "adam" or "adamw".
        precision: the dtypes of the training.

    Raises:
        PlanError: a part has no device, the partial sums on devices do not add up to a value,
            groups that are recomputed overlap, the loss has no gradient for what is trained, or the
            optimizer or the dtype is not known.
        CoverageError: the parts of an op leave out work, or do some of it twice.
        OrderError: the orders of the plan form a cycle.
        DeviceMemoryError: a device needs more than the limit.
    """
    if master_dtype is not None:
        precision = former_precision(master_dtype)
    precision = Precision.of(precision)
    one_of("optimizer", optimizer, STATES)
    if any(tensor.requires_grad for tensor in plan.graph.parameters.values()):
        check_loss(plan.graph)
    check_assigned(plan)
    check_placement(plan)
    check_coverage(plan)
    made = materialize(plan, levels_of(topology))
    made.step_program.check()
    if memory_limit is not None:
        check_memory(made, memory_limit, optimizer=optimizer, precision=precision)
    return Compiled(made, optimizer, precision)
