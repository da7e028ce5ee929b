"""Load: trainers of a saved program: of this process, or of all ranks in threads."""

from __future__ import annotations

import itertools
import linecache
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.ops.modules import FILE as MODULES
from superscaler_core.ops.modules import load_modules
from superscaler_core.run.program_folder import (
    CONSTANTS,
    TOPOLOGY,
    WEIGHTS,
    ProgramFolder,
    load_constants,
)
from superscaler_core.run.rank import Rank
from superscaler_core.run.tables import Tables
from superscaler_core.run.together import ranks_of, texts_of_all
from superscaler_core.run.transport import Board, DistTransport, ThreadTransport, Transport
from superscaler_core.training.trainer import Trainer

T = TypeVar("T")


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
        PlanError: the program has no such rank, or has more ranks than the group; its folder is
            incomplete or mixes two programs; or ranks read different programs.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    program = ProgramFolder.open(folder)
    module = module_of(program, rank)
    if size < module.TABLES.num_ranks:
        raise PlanError(
            f"{folder} is a program of {module.TABLES.num_ranks} ranks and the group has {size}: "
            "start as many processes as the plan has devices."
        )
    if topology is None and TOPOLOGY in program:
        topology = rv.Topology.load(program.checked(TOPOLOGY))
    transport = DistTransport(rank, group, topology)
    check_same(program, module.TABLES, transport)
    made = Rank(module, transport, load_constants(program.read(CONSTANTS)), **options)
    return started(Trainer(made, transport), program)


def started(trainer: Trainer, program: ProgramFolder) -> Trainer:
    """The trainer, with the weights that were saved with its program, if any."""
    if WEIGHTS in program:
        trainer.load(program.checked(WEIGHTS))
    return trainer


def check_same(program: ProgramFolder, tables: Tables, transport: Transport) -> None:
    """Check that all ranks read one program; collective.

    Raises:
        PlanError: two ranks read different programs; on all ranks.
    """
    found = texts_of_all(program.identity, tables, transport)
    for rank, identity in zip(ranks_of(tables), found, strict=True):
        if identity != found[0]:
            raise PlanError(
                f"{program.root} has another program on rank {rank} than on rank "
                f"{ranks_of(tables)[0]}: give all ranks the folder of one save."
            )


def module_from(text: str, rank: int) -> ModuleType:
    """Import the generated text of one rank."""
    place = f"<superscaler_program.rank_{rank} {next(_numbers)}>"
    # Tracebacks and debuggers look source lines up here.
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    return _run(text, rank, place)


def _run(text: str, rank: int, place: str) -> ModuleType:
    module = ModuleType(f"superscaler_program.rank_{rank}")
    exec(compile(text, place, "exec"), module.__dict__)
    return module


_numbers = itertools.count()
"""Numbers of texts that were imported, so that each has a name of its own."""


def module_of(program: ProgramFolder, rank: int) -> ModuleType:
    """Import the generated file of one rank, and enter the modules of the model that it may call.

    The file's text is run as it was read. Python's own import would run its cached bytecode, which
    it takes for that of any file of the same size and time.

    Raises:
        PlanError: the program has no such rank, or its files are not those that were saved.
    """
    if rank not in program.ranks:
        raise PlanError(
            f"{program.root} has no program for rank {rank}; it has ranks {program.ranks}: start "
            "as many processes as the plan has devices."
        )
    if MODULES in program:
        load_modules(program.read(MODULES))
    name = f"rank_{rank}.py"
    return _run(program.read(name).decode(), rank, str(program.path(name)))


# --- ranks in threads of one process, for tests and for trying a plan ---------------------------


def run_threads(
    folder: str | Path,
    work: Callable[[Trainer], T],
    ranks: Mapping[int, Any] | range,
    *,
    timeout_secs: float = 60.0,
    **options: Any,
) -> dict[int, T]:
    """Call ``work(trainer)`` on every rank, each in a thread; return the results by rank.

    Communication is by ``rvdcomm.simulate``: it is correct and its bytes are counted, but slow.

    Args:
        folder: a program that ``Compiled.save`` wrote.
        work: called on every rank; collective calls must have the same order on all ranks.
        ranks: ranks of the program.
        timeout_secs: a rank that waits longer than this for another rank fails.
        options: options of ``Rank``.

    Raises:
        Exception: the exception of the first rank that failed.
    """
    # Read once, outside the threads: numpy parses headers with `ast`, whose recursion depth CPython
    # 3.11 and 3.12 count per interpreter, so two threads in it raise SystemError. Every rank has a
    # copy, because loading a state changes the values.
    program = ProgramFolder.open(folder)
    constants = load_constants(program.read(CONSTANTS))

    def serve(transport: ThreadTransport) -> T:
        own = {name: value.clone() for name, value in constants.items()}
        made = Rank(module_of(program, transport.rank), transport, own, **options)
        return work(started(Trainer(made, transport), program))

    return in_threads(serve, ranks, timeout_secs=timeout_secs)


def in_threads(
    work: Callable[[ThreadTransport], T],
    ranks: Mapping[int, Any] | range,
    *,
    timeout_secs: float = 60.0,
) -> dict[int, T]:
    """Call ``work`` on every rank, each in a thread with its transport; return the results.

    Args:
        work: called on every rank.
        ranks: the ranks.
        timeout_secs: a rank that waits longer than this for another rank fails.

    Raises:
        Exception: the exception of the first rank that failed.
    """
    board = Board(timeout_secs, len(ranks))
    results: dict[int, T] = {}

    def serve(rank: int) -> None:
        try:
            results[rank] = work(ThreadTransport(rank, board))
        except BaseException as error:
            board.fail(error)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in ranks]
    grad = torch.is_grad_enabled()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_grad_enabled(grad)
    if board.error is not None:
        raise board.error
    return results
