"""Command line: ``superscaler COMMAND``, with one module per command."""

from superscaler_core.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
