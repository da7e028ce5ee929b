"""Command line: ``superscaler COMMAND``, with one module per command."""

from superscaler_core.cli.main import main

__all__ = ["main"]
