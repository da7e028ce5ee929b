"""Main: the command line as a whole; ``superscaler --help`` lists the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import rvdcomm as rv
from superscaler_core.cli import explain, plan, run, schedule, search, simulate, validate
from superscaler_core.cli.arguments import NAMES, Formatter, Parser
from superscaler_core.cli.command import BAD_REQUEST, INTERRUPTED, OK, USER_ERRORS

COMMANDS = {
    "plan": plan.COMMAND,
    "validate": validate.COMMAND,
    "explain": explain.COMMAND,
    "simulate": simulate.COMMAND,
    "search": search.COMMAND,
    "run": run.COMMAND,
    "schedule": schedule.COMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    0: done. 1: not valid. 2: a bad request. 130: interrupted by Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(words)
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed the pipe; discard the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print("superscaler: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (*USER_ERRORS, OSError, UnicodeError) as error:
        print(f"superscaler: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_REQUEST


def _parser() -> Parser:
    parser = Parser(
        prog="superscaler",
        description="Parallelize the training of a PyTorch model by a plan: see what it sends and "
        "needs, check it, run it.",
        epilog=f"example:\n  superscaler plan gpt megatron --devices 4\n\n{NAMES}",
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"superscaler {rv.__version__}")
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
