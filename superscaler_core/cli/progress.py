"""Progress: shows the current phase on a terminal, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Show the name of a phase while it runs."""
    with tqdm(desc=name, bar_format="{desc} ...", leave=False, disable=None) as bar:
        bar.refresh()
        yield
