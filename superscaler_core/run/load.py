"""Load: creates a trainer from the folder of a generated program."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.ops.modules import load_modules
from superscaler_core.run.constants import TOPOLOGY, WEIGHTS, load_constants
from superscaler_core.run.rank import Rank
from superscaler_core.run.trainer import Trainer
from superscaler_core.run.transport import DistTransport


def load(
    folder: str | Path, *, group: Any = None, topology: rv.Topology | None = None, **options: Any
) -> Trainer:
    """Load this rank's part of a program; the process group must exist already.

    The trainer starts with the weights that the captured model had when the program was saved.
    Collective over the program's ranks: device ``d`` of the plan is rank ``d`` of the group.

    Args:
        folder: the folder that ``Compiled.save`` wrote.
        group: process group; the default group if None.
        topology: hosts and links; those that the program was compiled for if None.
        options: ``seed`` of dropout (an int); ``dtype`` of stored parameters (the model's if None;
            float32 gives a model in bfloat16 master weights); ``device``.

    Raises:
        PlanError: the program has no such rank, or has more ranks than the group.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    module = module_of(folder, rank)
    if size < module.TABLES.num_ranks:
        raise PlanError(
            f"{folder} is a program of {module.TABLES.num_ranks} ranks and the group has {size}: "
            "start as many processes as the plan has devices."
        )
    saved = Path(folder) / TOPOLOGY
    if topology is None and saved.exists():
        topology = rv.Topology.load(saved)
    transport = DistTransport(rank, group, topology)
    made = Rank(module, transport, load_constants(Path(folder)), **options)
    return started(Trainer(made, transport), folder)


def started(trainer: Trainer, folder: str | Path) -> Trainer:
    """The trainer, with the weights that were saved with its program, if any."""
    weights = Path(folder) / WEIGHTS
    if weights.exists():
        trainer.load(weights)
    return trainer


def module_from(text: str, rank: int) -> ModuleType:
    """Import the generated text of one rank."""
    name = f"superscaler_program.rank_{rank}"
    place = f"<{name} {next(_numbers)}>"
    module = ModuleType(name)
    # Tracebacks and debuggers look source lines up here.
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    exec(compile(text, place, "exec"), module.__dict__)
    return module


_numbers = itertools.count()
"""Numbers of texts that were imported, so that each has a name of its own."""


def module_of(folder: str | Path, rank: int) -> ModuleType:
    """Import the generated file of one rank, and the modules of the model that it calls.

    Raises:
        PlanError: the program has no such rank.
    """
    path = Path(folder) / f"rank_{rank}.py"
    load_modules(Path(folder))
    if not path.exists():
        have = sorted(int(p.stem[5:]) for p in Path(folder).glob("rank_*.py"))
        raise PlanError(
            f"{folder} has no program for rank {rank}; it has ranks {have}: start as many "
            "processes as the plan has devices."
        )
    spec = importlib.util.spec_from_file_location(f"superscaler_program.rank_{rank}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
