"""Text of a page: its parts between comments, lines, links and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from textwrap import fill
from typing import Any

WIDTH = 118
"""Of text; tables are as wide as they are."""

Result = Mapping[str, Any]
"""What a command wrote."""


@dataclass(frozen=True)
class Pictures:
    """Draws pictures for a page.

    Attributes:
        images: folder of the pictures.
        folder: of the page.
    """

    images: Path
    folder: Path

    def add(self, name: str, title: str, draw: Callable[[Path], None]) -> str:
        """Draw a picture; returns the text that shows it."""
        path = self.images / f"study_{name}.png"
        draw(path)
        return f"![{title}]({link(path, self.folder)})"


Section = Callable[[Result, Pictures], Iterator[str]]
"""From the result to paragraphs."""


def written(page: str, part: str, text: str) -> str:
    """A page with another text in one of its parts.

    Raises:
        ValueError: it has not each of the part's two comments once, in order.
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or page.count(begin) + page.count(end) != 2:
        raise ValueError(f"a page needs one {begin} and behind it one {end}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def listed(texts: Iterable[str]) -> str:
    """As a list."""
    return "\n".join(filled(text, "- ") for text in texts)


def link(path: Path, folder: Path) -> str:
    """A file as a page in a folder names it."""
    return Path(relpath(path.resolve(), folder.resolve())).as_posix()


def filled(text: str, head: str = "") -> str:
    """As lines; what follows a list's dash is indented."""
    rest = " " * len(head)
    return fill(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
