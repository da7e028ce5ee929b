"""Command line: ``rvdcomm COMMAND``, one module a command; ``rvdcomm --help`` lists them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata

from rvdcomm import CheckpointError, LayoutError
from rvdcomm.cli import bench, calibrate, plan, reshard, topology, verify
from rvdcomm.cli.arguments import NOTATION
from rvdcomm.cli.command import CommandLine
from rvdcomm.picture import PictureError


def _version() -> str:
    try:
        return metadata.version("rvdcomm")
    except metadata.PackageNotFoundError:
        return "from a source tree"


COMMAND_LINE = CommandLine(
    prog="rvdcomm",
    description="Search for a low-cost communication program between two layouts of a "
    "distributed tensor, prove it, and report its gap to a lower bound.",
    epilog="example:\n  rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 "
    f"--hosts 2x4\n\n{NOTATION}",
    version=_version(),
    commands={
        "plan": plan.COMMAND,
        "reshard": reshard.COMMAND,
        "verify": verify.COMMAND,
        "bench": bench.COMMAND,
        "topology": topology.COMMAND,
        "calibrate": calibrate.COMMAND,
    },
    errors=(LayoutError, CheckpointError, PictureError),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    0: done. 1: not proved, or a rank failed. 2: a bad request. 130: interrupted by Ctrl-C.

    >>> main(["verify", "R(1)V(2)D(1)", "R(2)V(1)D(1)", "--shape", "6"])  # doctest: +ELLIPSIS
    R(1)V(2)D(1) -> R(2)V(1)D(1)  6 float32 on 2 ranks
    proved   ...
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    passed_on: list[str] = []
    if words[:1] == ["bench"] and words[1:] not in (["-h"], ["--help"]):
        # The benchmark has options of its own; argparse would take them for ours.
        words, passed_on = words[:1], words[1:]
    return COMMAND_LINE.run(words, passed_on=passed_on)
