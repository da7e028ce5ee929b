"""Store: rows that were computed are kept, each with the commit of the code that computed it.

A kept row is used again while all code that it depends on is as it was at its commit: the files of
the two packages and of this folder that a row's computation imports. So a run that is stopped goes
on where it was, also over commits that change only documents, comments and docstrings.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.cells.code import code_of, git, trees_of
from bench.cells.processes import NUM_PROCESSES, side_by_side
from bench.cells.workload import Workload, keep_graphs

SCRATCH = Path("bench/results/scratch/cells")

PACKAGES = ("superscaler_core", "rvdcomm")

IMPORTS = re.compile(r"^from (bench[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)

Row = Mapping[str, Any]
"""What came of one job."""

Compute = Callable[[str, str, float], dict[str, Any]]
"""From a cell's name, a planner's name and a budget in seconds to a row; importable by name."""


class DirtyError(Exception):
    """Files that rows depend on differ from the commit."""


@dataclass(frozen=True)
class Version:
    """The code that is there.

    Attributes:
        commit: its short name; it ends in "-dirty" if files differ.
        paths: of packages and files that rows depend on.
    """

    commit: str
    paths: tuple[str, ...]

    @classmethod
    def now(cls, module: str, *, may_be_dirty: bool = False) -> Version:
        """The code that is there, of which a module computes rows.

        Raises:
            DirtyError: it is no commit's, and may not be.
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
        """Whether the code is still the same; what is not committed may change."""
        changed = _git("status", "--porcelain", "--", *self.paths)
        return self.commit.endswith("-dirty") or (not changed and self.is_of(_head()))

    def is_of(self, commit: str) -> bool:
        """Whether rows of another commit are those of this one."""
        here, there = trees_of(self.commit, self.paths), trees_of(commit, self.paths)
        if here is None or there is None:
            return False
        return here == there or code_of(self.commit, self.paths) == code_of(commit, self.paths)

    @property
    def key(self) -> str:
        """A name that no other code has."""
        code = code_of(self.commit, self.paths) or self.commit
        return sha256(code.encode()).hexdigest()[:12]


def sources(module: str) -> list[str]:
    """The files of this folder that a module of it is made of: its own, and those it imports."""
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
        cell, planner: names.
        budget_secs: of its search.
        workload: what is captured before all searches; nothing if None.
    """

    cell: str
    planner: str
    budget_secs: float
    workload: Workload | None = None

    @property
    def path(self) -> Path:
        """Where its row is kept."""
        return SCRATCH / f"{self.cell}-{self.planner}.json".replace(" ", "_")

    def kept(self, version: Version) -> dict[str, Any] | None:
        """The row that is kept, if it is of this code and a larger budget would not better it."""
        with suppress(OSError, ValueError):
            row: dict[str, Any] = json.loads(self.path.read_text())
            is_done = row.get("left") == 0 or row["budget_secs"] >= self.budget_secs
            if is_done and version.is_of(row["commit"]):
                return row
        return None


def rows_of(
    jobs: Sequence[Job], compute: Compute, version: Version, num_processes: int
) -> Iterator[dict[str, Any]]:
    """The rows of some jobs, those that are kept first; what is missing is computed in its order.

    Args:
        jobs: the most important first.
        compute: what a job does.
        version: the code that is there.
        num_processes: jobs at a time; none computes nothing.
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
        # A search has several processes, and capturing one.
        at_once = num_processes * NUM_PROCESSES
        for _ in side_by_side(partial(_capture, graphs), workloads_of(missing), at_once, "models"):
            pass
        do = partial(_computed, compute, version, graphs)
        yield from side_by_side(do, missing, num_processes, "searches")


def workloads_of(jobs: Sequence[Job]) -> list[Workload]:
    """What some jobs train, each once."""
    found: list[Workload] = []
    for job in jobs:
        if job.workload is not None and job.workload not in found:
            found.append(job.workload)
    return found


def _capture(graphs: Path, workload: Workload) -> None:
    keep_graphs(graphs)
    workload.capture()


def _computed(compute: Compute, version: Version, graphs: Path, job: Job) -> dict[str, Any]:
    keep_graphs(graphs)
    start = time.monotonic()
    row = compute(job.cell, job.planner, job.budget_secs)
    took_secs = time.monotonic() - start
    row |= {"budget_secs": job.budget_secs, "took_secs": took_secs, "commit": version.commit}
    if not version.is_here:
        raise DirtyError(f"files were changed during the run, which is of {version.commit}.")
    job.path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: a run may be stopped at any time.
    part = job.path.with_suffix(".part")
    part.write_text(json.dumps(row))
    part.rename(job.path)
    return row


def commits_text(rows: Sequence[Row]) -> str:
    """The commits of some rows; more than one are of the same code in all that rows depend on."""
    found = sorted({row["commit"] for row in rows})
    if len(found) < 2:
        return f"commit {''.join(found)}"
    return f"commits {', '.join(found)}, equal in all that rows depend on"
