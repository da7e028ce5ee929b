"""Text of a page: its parts between comments, lines, links and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from textwrap import fill
from typing import Any

WIDTH = 118
"""Columns of running text; tables are not wrapped."""

Result = Mapping[str, Any]
"""The content of a result file."""


@dataclass(frozen=True)
class Pictures:
    """Draws pictures for a page.

    Attributes:
        images: folder of the pictures.
        folder: folder of the page.
        draws: whether pictures are drawn, not only shown.
    """

    images: Path
    folder: Path
    draws: bool = True

    def add(self, name: str, title: str, draw: Callable[[Path], None]) -> str:
        """Draw a picture; returns the text that shows it."""
        path = self.images / f"study_{name}.png"
        if self.draws:
            draw(path)
        return f"![{title}]({link(path, self.folder)})"


Section = Callable[[Result, Pictures], Iterator[str]]
"""From a result to the paragraphs of a page."""


def written(page: str, part: str, text: str) -> str:
    """The page with ``text`` as the new content of one of its parts.

    Raises:
        ValueError: the page does not have each of the part's two comments once, in order.
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or page.count(begin) + page.count(end) != 2:
        raise ValueError(f"a page needs one {begin} and behind it one {end}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def listed(texts: Iterable[str]) -> str:
    """The texts as a Markdown list."""
    return "\n".join(filled(text, "- ") for text in texts)


def link(path: Path, folder: Path) -> str:
    """The path of a file relative to the folder of the page that links to it."""
    return Path(relpath(path.resolve(), folder.resolve())).as_posix()


def filled(text: str, head: str = "") -> str:
    """Wrap a text into lines; those after the first are indented by the length of ``head``."""
    rest = " " * len(head)
    return fill(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
