"""Store: computed rows are stored, each with the commit of the code that computed the row.

A stored row is valid while the code that it depends on is the same as at its commit: the two
packages, and the files of ``bench`` that the computation of a row imports. Rows of the engine's own
planners do not depend on the systems that they are compared with. A run that was stopped therefore
resumes where it stopped, also after a commit that changes only documents, comments and docstrings.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.cells.alarm import move_on_after
from bench.cells.code import code_of, git, trees_of
from bench.cells.processes import CLOCK, side_by_side
from bench.cells.workload import Workload, keep_graphs
from superscaler_core.planners import PLANNERS

MOST = 4
"""A search is stopped after so many times its budget, and then has no plan. It goes on beyond its
budget for a first plan. One in evaluations has no limit."""

SCRATCH = Path("bench/results/scratch/cells")

PACKAGES = ("superscaler_core", "rvdcomm")

SYSTEMS = "bench/studies/systems.py"
"""The file that defines the systems with which the engine's own planners are compared."""

IMPORTS = re.compile(r"^from (bench[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)

Row = Mapping[str, Any]
"""The result of one job."""

Compute = Callable[..., dict[str, Any]]
"""From the name of a cell, the name of a planner and a budget in seconds to a row; picklable.

It takes ``max_tried`` as well if jobs have it.
"""


class DirtyError(Exception):
    """Files that rows depend on are not committed, or changed during the run."""


@dataclass(frozen=True)
class Version:
    """The current version of the code.

    Attributes:
        commit: short name of the commit; it ends in "-dirty" if files differ from the commit.
        paths: packages and files that rows depend on.
    """

    commit: str
    paths: tuple[str, ...]

    @classmethod
    def now(cls, module: str, *, may_be_dirty: bool = False) -> Version:
        """The current version of the code with which ``module`` computes rows.

        Raises:
            DirtyError: the code is not committed, and ``may_be_dirty`` is false.
        """
        paths = (*PACKAGES, *sources(module))
        commit = _head("--short") or "unknown"
        changed = _git("status", "--porcelain", "--", *paths)
        if changed is not None and not changed:
            return cls(commit, paths)
        if not may_be_dirty:
            raise DirtyError(
                f"results name the commit that they are of, and these differ from {commit}:\n"
                f"{changed or 'there is no git repository'}\n"
                "Commit them first; or use --dirty, which writes no result file."
            )
        return cls(f"{commit}-dirty", paths)

    @property
    def is_here(self) -> bool:
        """Whether the code is still this version; always true for code that is not committed."""
        changed = _git("status", "--porcelain", "--", *self.paths)
        return self.commit.endswith("-dirty") or (not changed and self._is_of(_head(), self.paths))

    def has(self, row: Row) -> bool:
        """Whether the commit of a row has the same code, so that the row is valid here."""
        is_ours = row.get("planner") in PLANNERS
        paths = tuple(path for path in self.paths if not (is_ours and path == SYSTEMS))
        return self._is_of(row["commit"], paths)

    def _is_of(self, commit: str, paths: tuple[str, ...]) -> bool:
        """Whether a commit has the same code under some paths."""
        here, there = trees_of(self.commit, paths), trees_of(commit, paths)
        if here is None or there is None:
            return False
        return here == there or code_of(self.commit, paths) == code_of(commit, paths)

    @property
    def key(self) -> str:
        """A hash that differs for different code."""
        code = code_of(self.commit, self.paths) or self.commit
        return sha256(code.encode()).hexdigest()[:12]


def sources(module: str) -> list[str]:
    """The files of ``bench`` that a module of it depends on: its own, and all that it imports."""
    found: dict[str, None] = {}
    waiting = [module]
    while waiting:
        path = f"{waiting.pop().replace('.', '/')}.py"
        if path not in found and Path(path).exists():
            found[path] = None
            for package, names in IMPORTS.findall(Path(path).read_text()):
                waiting += [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))]
    return sorted(found)


def _head(*options: str) -> str:
    return _git("rev-parse", *options, "HEAD") or ""


def _git(*words: str) -> str | None:
    printed = git(*words)
    return None if printed is None else printed.decode().strip()


@dataclass(frozen=True)
class Job:
    """One row to compute.

    Attributes:
        cell, planner: names of the cell and of the planner.
        budget_secs: time budget of the search.
        workload: the model to capture before all searches; if None, there is nothing to capture.
        max_tried: budget of the search in evaluations; 0 if it is in seconds.
        num_gpus: of the cell.
    """

    cell: str
    planner: str
    budget_secs: float
    workload: Workload | None = None
    max_tried: int = 0
    num_gpus: int = 0

    @property
    def path(self) -> Path:
        """The file that stores the row."""
        limit = f"-{self.max_tried}" if self.max_tried else ""
        return SCRATCH / f"{self.cell}-{self.planner}{limit}.json".replace(" ", "_")

    def kept(self, version: Version) -> dict[str, Any] | None:
        """The stored row, if it is valid for this version and had enough time; otherwise None.

        A search had enough time if no candidate was left, or if its budget was at least as large.
        """
        with suppress(OSError, ValueError):
            row: dict[str, Any] = json.loads(self.path.read_text())
            is_done = row.get("left") == 0 or row["budget_secs"] >= self.budget_secs
            if is_done and version.has(row):
                return row
        return None

    def keep(self, row: Row) -> None:
        """Store the row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name and renamed when complete: a run may be stopped at any time.
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(row))
        part.rename(self.path)


def restore(path: Path, version: Version) -> None:
    """Store the rows of a result file that are valid for ``version``, unless better ones are there.

    So a run continues on a machine that has only what is committed.
    """
    for row in json.loads(path.read_text())["rows"]:
        limit = row.get("max_tried", 0)
        job = Job(row["cell"], row["planner"], row["budget_secs"], max_tried=limit)
        if version.has(row) and job.kept(version) is None:
            job.keep(row)


def rows_of(
    jobs: Sequence[Job], compute: Compute, version: Version, num_processes: int
) -> Iterator[dict[str, Any]]:
    """The rows of ``jobs``: stored rows first, then the missing ones, computed in their order.

    Args:
        jobs: the jobs, the most important first.
        compute: computes the row of a job.
        version: the current version of the code.
        num_processes: jobs that run at the same time; if 0, nothing is computed.
    """
    missing = []
    for job in jobs:
        row = job.kept(version)
        if row is None:
            missing.append(job)
        else:
            yield row
    if missing and num_processes:
        graphs = SCRATCH.parent / "graphs" / version.key
        for old in graphs.parent.glob("*"):
            if old != graphs:
                shutil.rmtree(old, ignore_errors=True)
        capture = partial(_capture, graphs)
        for _ in side_by_side(capture, workloads_of(missing), num_processes, "models"):
            pass
        do = partial(_computed, compute, version, graphs)
        yield from side_by_side(do, missing, num_processes, "searches")


def workloads_of(jobs: Sequence[Job]) -> list[Workload]:
    """The workloads of ``jobs``, one of each group with equal graphs."""
    found: dict[tuple[object, ...], Workload] = {}
    for job in jobs:
        if job.workload is not None:
            found.setdefault(job.workload.captures, job.workload)
    return [*found.values()]


def _capture(graphs: Path, workload: Workload) -> None:
    keep_graphs(graphs)
    workload.capture()


def _computed(compute: Compute, version: Version, graphs: Path, job: Job) -> dict[str, Any]:
    keep_graphs(graphs)
    start = CLOCK()
    limit = {"max_tried": job.max_tried} if job.max_tried else {}
    most_secs = 0.0 if job.max_tried else MOST * job.budget_secs
    problem = f"stopped after {most_secs:g} s, {MOST} times the budget"
    row = {"cell": job.cell, "gpus": job.num_gpus, "planner": job.planner, "problem": problem}
    with move_on_after(most_secs, CLOCK):
        row = compute(job.cell, job.planner, job.budget_secs, **limit)
    took_secs = CLOCK() - start
    row |= {
        "budget_secs": job.budget_secs,
        "took_secs": took_secs,
        "commit": version.commit,
        **limit,
    }
    if not version.is_here:
        raise DirtyError(f"files were changed during the run, which is of {version.commit}.")
    job.keep(row)
    return row


def commits_text(rows: Sequence[Row]) -> str:
    """The commits of ``rows`` as text."""
    found = sorted({row["commit"] for row in rows})
    return f"commit{'s' if len(found) > 1 else ''} {', '.join(found)}"
