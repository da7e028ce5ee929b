"""``rvdcomm verify``: prove a program by symbolic execution."""

from __future__ import annotations

import argparse
import sys

from rvdcomm import LayoutError, Program, ProgramError
from rvdcomm.cli.arguments import NOTATION, PLAN_ARGUMENTS, add_transition, program_of
from rvdcomm.cli.command import FAILED, OK, Command, UsageError
from rvdcomm.cli.report import print_json, program_counts, program_json, proof_text
from rvdcomm.exports import MAX_SCHEDULE_BYTES, Schedule
from rvdcomm.json_file import read_json
from rvdcomm.layout import dtype_name
from rvdcomm.program import Proof, verify


def _verify(args: argparse.Namespace) -> int:
    """Prove a program, planned here or read from a file, or a schedule."""
    try:
        if args.schedule is not None:
            return _verify_schedule(args)
        program = program_of(args)
        proof = _prove(program)
    except ProgramError as error:
        if args.json:
            print_json({"proved": False, "error": str(error)})
        print(f"rvdcomm: not proved: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        counts = program_counts(program)
        apart = {"rounds_apart": proof.rounds_apart}
        print_json({"proved": True, **program_json(program), **counts, **apart})
    else:
        print(proof_text(program, proof))
    return OK


def _verify_schedule(args: argparse.Namespace) -> int:
    given = [name for name in (*PLAN_ARGUMENTS, "program_file") if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--schedule names all that moves; leave out {', '.join(given)}.")
    try:
        schedule = Schedule.from_json(read_json(args.schedule, MAX_SCHEDULE_BYTES))
    except LayoutError as error:
        raise UsageError(f"--schedule {args.schedule}: {error}.") from None
    schedule.prove()
    counts = {
        "tensors": len(schedule.tensors),
        "ranks": len(schedule.ranks),
        "rounds": len(schedule.rounds),
        "messages": sum(len(each.messages) for each in schedule.rounds),
        "sums": sum(len(each.sums) for each in schedule.rounds),
    }
    if args.json:
        print_json({"proved": True, **counts})
    else:
        print("proved", "  ".join(f"{name} {count}" for name, count in counts.items()), sep="  ")
    return OK


def _prove(program: Program) -> Proof:
    try:
        dtype_name(program.dtype)
        return verify(program)
    except (LookupError, ValueError) as error:
        # A damaged file can be wrong in ways that the verifier has no check of its own for.
        raise ProgramError(f"the program contradicts itself: {error!r}") from None


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", nargs="?", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", nargs="?", help="the layout that it is to get")
    parser.add_argument(
        "--program-file", metavar="FILE", help="a program as 'plan --program' prints it; - is stdin"
    )
    parser.add_argument(
        "--schedule", metavar="FILE", help="a schedule as 'plan --schedule' writes it"
    )
    add_transition(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    "prove a program by symbolic execution, or say what is wrong with it (exit status 1)",
    f"""{NOTATION}
examples:
  Plan and prove:
    rvdcomm verify 'R(2)V(4)D(1,1)' 'R(2)V(1)D(4,1)' --shape 64,64 --hosts 2x4
  Prove a program that 'rvdcomm plan ... --program' printed:
    rvdcomm verify --program-file program.txt
""",
    _add_verify,
    _verify,
)
