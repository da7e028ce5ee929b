"""Compile: from an sProgram's decisions to a program that ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import rvdcomm as rv
from superscaler_core.codegen import rank_files
from superscaler_core.collector import paused_collector
from superscaler_core.memory import DeviceMemory, check_memory, memory_of
from superscaler_core.plan import Plan, check_assigned, check_coverage, check_placement
from superscaler_core.program.materialized import Materialized, materialize
from superscaler_core.program.step_program import StepProgram
from superscaler_core.report import Report, report_of
from superscaler_core.run.checkpoint import save_weights
from superscaler_core.run.constants import TOPOLOGY, WEIGHTS, save_constants


@dataclass(frozen=True, eq=False)
class Compiled:
    """A plan, validated and materialized.

    Attributes:
        materialized: the plan and its communication.
        optimizer: that it will be trained with, by its name in ``memory.STATES``.
        master_dtype: of stored parameters; the model's if None.
    """

    materialized: Materialized
    optimizer: str = "adam"
    master_dtype: str | None = None

    @property
    def plan(self) -> Plan:
        """The sProgram's decisions."""
        return self.materialized.decided or self.materialized.plan

    @property
    def step_program(self) -> StepProgram:
        """All that devices do in a step, in one order; print it."""
        return self.materialized.step_program

    @cached_property
    def memory(self) -> Mapping[int, DeviceMemory]:
        """What every device needs."""
        return memory_of(
            self.materialized, optimizer=self.optimizer, master_dtype=self.master_dtype
        )

    def report(self, topology: rv.Topology | None = None) -> Report:
        """All communication and memory, in tables; print it.

        Args:
            topology: to look at the plan on another one than it was compiled for.
        """
        topology = topology or self.materialized.topology
        return report_of(self.materialized, self.memory, topology, self.master_dtype)

    def summary(self) -> str:
        """The plan in a few lines."""
        return self.report().summary()

    @cached_property
    def files(self) -> Mapping[int, str]:
        """The Python text of every rank."""
        return rank_files(self.materialized)

    def save(self, folder: str | Path, *, weights: bool = True) -> Path:
        """Write ``rank_0.py``, ..., the model's constants and the topology; returns the folder.

        Args:
            folder: made if missing.
            weights: whether the captured model's parameters are written too, as they are now, so
                that trainers start with them; each rank reads its part. Of a model on the meta
                device there are none.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        # A rank file that is left from a larger program would look like a rank of this one.
        for old in path.glob("rank_*.py"):
            old.unlink()
        for device, text in self.files.items():
            (path / f"rank_{device}.py").write_text(text)
        graph = self.plan.graph
        save_constants(path, {**graph.constants, **graph.buffers})
        save_weights(path / WEIGHTS, graph.weights if weights else {})
        (path / TOPOLOGY).unlink(missing_ok=True)
        if self.materialized.topology is not None:
            self.materialized.topology.save(path / TOPOLOGY)
        return path


@paused_collector()
def compile(
    plan: Plan,
    *,
    topology: rv.Topology | None = None,
    memory_limit: int | None = None,
    optimizer: str = "adam",
    master_dtype: str | None = None,
) -> Compiled:
    """Validate and materialize a plan.

    Args:
        plan: with a device for every part.
        topology: who is near to whom, and how fast; one host with fast links if None. It is saved
            with the program, and communication is planned for it.
        memory_limit: bytes that no device may need more than; not checked if None.
        optimizer: that it will be trained with: "sgd", "momentum", "adam" or "adamw".
        master_dtype: of stored parameters, as ``load`` takes it; the model's if None.

    Raises:
        PlanError: a part has no device, devices hold sums that do not make a value, or groups that
            run again cross; CoverageError, OrderError: what the names say.
        DeviceMemoryError: a device needs more than the limit.
    """
    check_assigned(plan)
    check_placement(plan)
    check_coverage(plan)
    made = materialize(plan, topology)
    if memory_limit is not None:
        check_memory(made, memory_limit, optimizer=optimizer, master_dtype=master_dtype)
    return Compiled(made, optimizer, master_dtype)
