"""Main: the command line as a whole; ``superscaler --help`` lists the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rvdcomm as rv
from rvdcomm.cli import CommandLine
from superscaler_core.cli import explain, plan, profile, run, schedule, search, simulate, validate
from superscaler_core.cli.arguments import NAMES
from superscaler_core.cli.errors import USER_ERRORS

COMMAND_LINE = CommandLine(
    prog="superscaler",
    description="Parallelize the training of a PyTorch model by a plan: see what it sends and "
    "needs, check it, run it.",
    epilog=f"example:\n  superscaler plan gpt megatron --devices 4\n\n{NAMES}",
    version=rv.__version__,
    commands={
        "plan": plan.COMMAND,
        "validate": validate.COMMAND,
        "explain": explain.COMMAND,
        "simulate": simulate.COMMAND,
        "search": search.COMMAND,
        "run": run.COMMAND,
        "schedule": schedule.COMMAND,
        "profile": profile.COMMAND,
    },
    errors=USER_ERRORS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    0: done. 1: not valid. 2: a bad request. 130: interrupted by Ctrl-C.
    """
    return COMMAND_LINE.run(sys.argv[1:] if argv is None else argv)
