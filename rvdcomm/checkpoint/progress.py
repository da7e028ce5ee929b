"""Progress: a bar on stderr, for people who wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DELAY_SECS = 2.0
"""A run that is shorter shows no bar."""


class Bar:
    """A progress bar in bytes that are read; does nothing where no total is given."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if self.total is None:
            return lambda num_bytes: None
        from tqdm import tqdm

        # disable=None: no bar where stderr is no terminal.
        self.bar = tqdm(total=self.total, unit="B", unit_scale=True, delay=DELAY_SECS, disable=None)
        return lambda num_bytes: self.bar.update(num_bytes)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
