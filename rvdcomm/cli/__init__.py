"""Command line: ``rvdcomm COMMAND``, one module a command; ``rvdcomm --help`` lists them."""

from rvdcomm.cli.arguments import named_network, num_bytes
from rvdcomm.cli.command import FAILED, OK, Command, CommandLine, UsageError
from rvdcomm.cli.main import main

__all__ = [
    "FAILED",
    "OK",
    "Command",
    "CommandLine",
    "UsageError",
    "main",
    "named_network",
    "num_bytes",
]
