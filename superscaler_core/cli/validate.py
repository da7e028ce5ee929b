"""``superscaler validate``: check a plan, and report the checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rvdcomm.cli import FAILED, OK, Command
from rvdcomm.units import bytes_text
from superscaler_core.cli.arguments import NAMES, add_cluster, add_program, program_of, topology_of
from superscaler_core.errors import PlanError
from superscaler_core.materialize.materialized import Materialized, materialize
from superscaler_core.memory import check_memory, memory_of
from superscaler_core.plan import Plan, check_assigned, check_coverage, check_placement
from superscaler_core.precision import Precision
from superscaler_core.report import moves_of
from superscaler_core.schedules import Action, ScheduleError


def _validate(args: argparse.Namespace) -> int:
    try:
        for name, finding in _findings(program_of(args).plan, args):
            print(f"ok      {name + ':':<14} {finding}", flush=True)
    except (PlanError, ScheduleError) as error:
        print(f"failed  {error}")
        return FAILED
    return OK


def _findings(plan: Plan, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Each check with its result; the first check that fails raises."""
    check_assigned(plan)
    num_parts = sum(len(plan.parts(op)) for op in plan.graph.ops)
    yield "devices", f"all {num_parts} parts of {len(plan.graph.ops)} ops have one"
    check_placement(plan)
    workers = 1 if plan.schedule is None else plan.schedule.num_workers
    yield "placement", f"stages of each of {workers} workers are on the same devices"
    check_coverage(plan)
    yield "coverage", "the parts of every op do all of its work, and each piece of it once"
    made = materialize(plan)
    runs = sum(isinstance(event, Action) for event in made.scheduled)
    made.step_program.check()
    yield "order", f"{runs} forwards and backwards of stages, without a cycle"
    moves = list(moves_of(made, topology_of(args), Precision(args.master_dtype)))
    num_proved = 0
    for proved in dict.fromkeys(plan for move in moves for plan in move.plans):
        proved.verify()
        num_proved += 1
    yield "communication", f"{len(moves)} transfers by {num_proved} plans, each proved right"
    yield "memory", _memory(made, args)


def _memory(made: Materialized, args: argparse.Namespace) -> str:
    options = {"optimizer": args.optimizer, "precision": Precision(args.master_dtype)}
    if args.memory_limit is None:
        found = memory_of(made, **options)
    else:
        found = check_memory(made, args.memory_limit, **options)
    most = bytes_text(max(memory.total_bytes for memory in found.values()))
    if args.memory_limit is None:
        return f"{most} a device at most; there is no --memory-limit"
    return f"{most} a device at most, of {bytes_text(args.memory_limit)}"


def _add(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    add_cluster(parser)


COMMAND = Command(
    "check that a plan is complete, possible, and fits the devices (exit 1 if not)",
    f"""{NAMES}
examples:
  Is this a plan?
    superscaler validate gpt one_f_one_b --devices 2 --set microbatches=4
  Does it fit devices of 16 GiB?
    superscaler validate gpt zero3 --preset 1.3B --devices 8 --microbatch 8 --memory-limit 16GiB
""",
    _add,
    _validate,
)
