"""Command line: ``superscaler COMMAND``, a module a command."""

from superscaler_core.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
