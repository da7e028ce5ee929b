"""Command line: ``rvdcomm COMMAND``, one module a command; ``rvdcomm --help`` lists them."""

from rvdcomm.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
