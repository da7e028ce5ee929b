"""``rvdcomm verify``: prove a program by symbolic execution over all ranks."""

from __future__ import annotations

import argparse
import sys

from rvdcomm.cli.arguments import NOTATION, add_transition, program_of
from rvdcomm.cli.command import NOT_PROVED, OK, Command
from rvdcomm.cli.report import print_json, program_counts, proof_text, transition_json
from rvdcomm.errors import ProgramError
from rvdcomm.layout import dtype_name
from rvdcomm.program import Program
from rvdcomm.program.verify import verify


def _verify(args: argparse.Namespace) -> int:
    """Prove a program, planned here or read from a file."""
    try:
        program = program_of(args)
        _prove(program)
    except ProgramError as error:
        if args.json:
            print_json({"proved": False, "error": str(error)})
        print(f"rvdcomm: not proved: {error}", file=sys.stderr)
        return NOT_PROVED
    if args.json:
        counts = program_counts(program)
        print_json({"proved": True, **transition_json(program), **counts})
    else:
        print(proof_text(program))
    return OK


def _prove(program: Program) -> None:
    try:
        dtype_name(program.dtype)
        verify(program)
    except (LookupError, ValueError) as error:
        # A damaged file can name what does not exist in more ways than the verifier foresees.
        raise ProgramError(f"the program contradicts itself: {error!r}") from None


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", nargs="?", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", nargs="?", help="the layout that it gets")
    parser.add_argument(
        "--program-file", metavar="FILE", help="a program as 'plan --program' prints it; - is stdin"
    )
    add_transition(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    "prove by symbolic execution over all ranks that a program is right (exit 1 if not)",
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
