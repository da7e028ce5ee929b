"""Command: a command line of sub-commands, each of which is a value."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill, wrap
from typing import Any, NoReturn

MAX_COLUMNS = 98
"""Widest line of a help text."""

OK, FAILED, BAD_REQUEST, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


class UsageError(ValueError):
    """The command line cannot be understood, or names something that does not exist."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ``UsageError`` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line."""
        raise UsageError(f"{message} (see '{self.prog} --help')")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter as wide as the terminal, or as ``COLUMNS`` says; at most 98 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_columns())

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Names with hyphens stay whole, so that they can be copied.
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _columns() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns - 2, MAX_COLUMNS)


@dataclass(frozen=True)
class Command:
    """One sub-command: ``run`` gets the parsed arguments and returns the exit status."""

    summary: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class CommandLine:
    """A program of several sub-commands.

    Attributes:
        prog: name of the program.
        description, epilog: of its help.
        version: text of ``--version``.
        commands: the sub-commands by name.
        errors: errors of users, which are printed in one line without a traceback.
    """

    prog: str
    description: str
    epilog: str
    version: str
    commands: Mapping[str, Command]
    errors: tuple[type[Exception], ...]

    def run(self, words: Sequence[str], **given: Any) -> int:
        """Run a command line and return its exit status.

        Args:
            words: words of the command line.
            given: further arguments of the sub-command.
        """
        known: tuple[type[Exception], ...] = (UsageError, *self.errors, OSError, UnicodeError)
        try:
            args = self.parser().parse_args(words, argparse.Namespace(**given))
            status = self.commands[args.command].run(args)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe; discard the rest of the output.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        except KeyboardInterrupt:
            print(f"{self.prog}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except known as error:
            print(f"{self.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
            return BAD_REQUEST

    def parser(self) -> Parser:
        """The parser of all sub-commands; it has the name of the chosen one as ``command``."""
        parser = Parser(
            prog=self.prog,
            description=fill(self.description, _columns(), break_on_hyphens=False),
            epilog=self.epilog,
            formatter_class=Formatter,
        )
        parser.add_argument("--version", action="version", version=f"{self.prog} {self.version}")
        commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for name, command in self.commands.items():
            sub = commands.add_parser(
                name,
                help=command.summary,
                description=command.summary[0].upper() + command.summary[1:] + ".",
                epilog=command.epilog,
                formatter_class=Formatter,
            )
            command.add_arguments(sub)
        return parser
