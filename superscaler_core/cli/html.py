"""The option ``--html`` of commands that know a plan and its simulated step."""

from __future__ import annotations

import argparse
from pathlib import Path

from superscaler_core.page import SUFFIXES


def page_file(text: str) -> str:
    """Parse the name of a page.

    Raises:
        argparse.ArgumentTypeError: it has a suffix that no browser opens as a page.
    """
    if Path(text).suffix not in SUFFIXES:
        names = " or ".join(f"FILE{suffix}" for suffix in SUFFIXES)
        raise argparse.ArgumentTypeError(f"expected {names}, got {text!r}")
    return text


def add_html(parser: argparse.ArgumentParser, more: str) -> None:
    """Add ``--html``; ``more`` says what else is on the page."""
    parser.add_argument(
        "--html", metavar="FILE.html", type=page_file,
        help="write a page to open in a browser, which needs no network: devices over time (zoom "
        "by the wheel, pan by dragging), their memory, communication by edge with its plan in "
        f"words, how each layer is split, recomputed and placed{more}",
    )  # fmt: skip
