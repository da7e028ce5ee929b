"""Compile: from an sProgram's decisions to a program that ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from superscaler_core.codegen import rank_files
from superscaler_core.materialize.materialized import Materialized, materialize
from superscaler_core.plan import Plan
from superscaler_core.run.constants import save_constants
from superscaler_core.validate import check_assigned, check_coverage


@dataclass(frozen=True, eq=False)
class Compiled:
    """A plan, validated and materialized.

    Attributes:
        materialized: the plan and its communication.
    """

    materialized: Materialized

    @property
    def plan(self) -> Plan:
        """The sProgram's decisions."""
        return self.materialized.plan

    @cached_property
    def files(self) -> Mapping[int, str]:
        """The Python text of every rank."""
        return rank_files(self.materialized)

    def save(self, folder: str | Path) -> Path:
        """Write ``rank_0.py``, ... and the model's constants to a folder; returns the folder."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        # A rank file that is left from a larger program would look like a rank of this one.
        for old in path.glob("rank_*.py"):
            old.unlink()
        for device, text in self.files.items():
            (path / f"rank_{device}.py").write_text(text)
        save_constants(path, self.plan.graph.constants)
        return path


def compile(plan: Plan) -> Compiled:
    """Validate and materialize a plan.

    Raises:
        PlanError: a part has no device; CoverageError, OrderError: what the names say.
    """
    check_assigned(plan)
    check_coverage(plan)
    return Compiled(materialize(plan))
