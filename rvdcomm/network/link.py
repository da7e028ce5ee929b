"""Link: how fast a port is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rvdcomm.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex port: ``alpha_secs`` per round of messages, ``bytes_per_sec`` each way."""

    alpha_secs: float
    bytes_per_sec: float

    def __post_init__(self) -> None:
        # The comparisons are false for NaN, too. An infinite bandwidth is allowed.
        if not 0 <= self.alpha_secs < math.inf or not self.bytes_per_sec > 0:
            raise LayoutError(
                f"link with alpha_secs={self.alpha_secs}, bytes_per_sec={self.bytes_per_sec}: "
                "alpha_secs must be at least 0 and bytes_per_sec above 0."
            )
