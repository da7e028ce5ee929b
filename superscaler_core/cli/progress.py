"""Progress: what is going on, on a terminal; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Show a phase while it lasts."""
    with tqdm(desc=name, bar_format="{desc} ...", leave=False, disable=None) as bar:
        bar.refresh()
        yield
