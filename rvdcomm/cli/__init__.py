"""Command line: ``rvdcomm plan``, ``rvdcomm verify`` and ``rvdcomm bench``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from rvdcomm.cli.arguments import (
    NOTATION,
    Formatter,
    Parser,
    UsageError,
    add_transition,
    planned,
    program_of,
)
from rvdcomm.cli.report import plan_json, program_counts, proof_text, transition_json
from rvdcomm.dtypes import dtype_name
from rvdcomm.errors import LayoutError, ProgramError
from rvdcomm.picture import PictureError, draw
from rvdcomm.program import Program
from rvdcomm.verify import verify

OK, NOT_PROVED, BAD_REQUEST = 0, 1, 2
"""Exit statuses."""


@dataclass(frozen=True)
class Command:
    """One sub-command."""

    summary: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, 1 (not proved) or 2 (bad request).

    >>> main(["verify", "R(1)V(2)D(1)", "R(2)V(1)D(1)", "--shape", "6"])  # doctest: +ELLIPSIS
    R(1)V(2)D(1) -> R(2)V(1)D(1)  6 float32 on 2 ranks
    proved   ...
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    passed_on: list[str] = []
    if words[:1] == ["bench"] and words[1:] not in (["-h"], ["--help"]):
        # These are the benchmark's own; argparse would take its options for ours.
        words, passed_on = words[:1], words[1:]
    try:
        args = _parser().parse_args(words, argparse.Namespace(passed_on=passed_on))
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as `head`, has all that it wants; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (UsageError, LayoutError, PictureError, OSError, UnicodeDecodeError) as error:
        print(f"rvdcomm: error: {error}", file=sys.stderr)
        return BAD_REQUEST


# --- commands -----------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> int:
    """Plan a transition and print it in one of three forms."""
    found = planned(args)
    if args.picture:
        draw(found, args.picture)
    if args.json:
        _print_json(plan_json(found))
    elif args.program:
        print(found.program, end="")
    else:
        print(found)
        if args.picture:
            print(f"wrote  {args.picture}")
    return OK


def _verify(args: argparse.Namespace) -> int:
    """Prove a program, planned here or read from a file."""
    try:
        program = program_of(args)
        _prove(program)
    except ProgramError as error:
        if args.json:
            _print_json({"proved": False, "error": str(error)})
        print(f"rvdcomm: not proved: {error}", file=sys.stderr)
        return NOT_PROVED
    if args.json:
        counts = program_counts(program)
        _print_json({"proved": True, **transition_json(program), **counts})
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


def _bench(args: argparse.Namespace) -> int:
    """Run the benchmark of the source tree that this package lies in."""
    root = FilePath(__file__).resolve().parents[2]
    if not (root / "bench" / "run.py").exists():
        raise UsageError(
            "the benchmark is part of the repository and not of the installed package; "
            "run 'make bench' in a clone of the repository."
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    passed_on = args.passed_on[1:] if args.passed_on[:1] == ["--"] else args.passed_on
    command = [sys.executable, "-m", "bench.run", *passed_on]
    return subprocess.run(command, env=environment, check=False).returncode


# --- arguments ----------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="rvdcomm",
        description="Plan, prove and run the cheapest communication between two layouts of a "
        "distributed tensor.",
        epilog="example:\n  rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 "
        f"--hosts 2x4\n\n{NOTATION}",
        formatter_class=Formatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=command.epilog,
            formatter_class=Formatter,
        )
        command.add_arguments(sub)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", help="the layout that it gets")
    add_transition(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--program", action="store_true", help="print the program, for 'verify'")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw who sends what to whom, as .svg or .png"
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", nargs="?", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", nargs="?", help="the layout that it gets")
    parser.add_argument(
        "--program-file", metavar="FILE", help="a program as 'plan --program' prints it; - is stdin"
    )
    add_transition(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", metavar="ARGS", nargs="*", help="passed on to 'bench.run'")


COMMANDS = {
    "plan": Command(
        "print the cheapest plan from layout SRC to layout DST",
        f"""{NOTATION}
examples:
  Columns become rows on 2 hosts of 4 ranks; draw it, too:
    rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 --hosts 2x4 --picture plan.svg
  From 4 ranks to 6 others, within a memory limit:
    rvdcomm plan 'R(1)V(1)D(4)' 'R(1)V(1)D(6)' --shape 1000 --dst-ranks 4:10 --memory-limit 64KiB
  Prove what was planned:
    rvdcomm plan 'R(1)V(4)D(1)' 'R(4)V(1)D(1)' --shape 64 --program > program.txt
    rvdcomm verify --program-file program.txt
""",
        _add_plan,
        _plan,
    ),
    "verify": Command(
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
    ),
    "bench": Command(
        "run the repository's benchmark ('python -m bench.run ARGS') from its source tree",
        """examples:
  The benchmark's own options:
    rvdcomm bench -- --help
""",
        _add_bench,
        _bench,
    ),
}


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))
