"""Issued: kernels that a host issues one after another, and a device executes in that order."""

from __future__ import annotations

from typing import NamedTuple


class Issued(NamedTuple):
    """The times of kernels that follow each other.

    A device is late when its host is: a kernel begins when the one before has ended and the host
    has issued it. Ends of the device are therefore sums and maxima of these three numbers alone,
    whatever the kernels are (a max-plus linear system: Baccelli, Cohen, Olsder, Quadrat 1992).

    Laws (tests/superscaler_core/cost/test_issued.py): ``then`` is associative, and ``end`` of a
    sequence is that of a device and a host that are followed kernel by kernel. If the host takes
    no time, ``whole`` equals ``device``.

    Attributes:
        device: time in which the device executes them.
        host: time in which the host issues them.
        whole: time from when the host begins until the device ends, if the device is idle.
    """

    device: float = 0.0
    host: float = 0.0
    whole: float = 0.0

    @classmethod
    def of(cls, device: float, launches: float = 0, issue: float = 0.0) -> Issued:
        """Kernels that each take the host ``issue``, and the device equal shares of its time."""
        host, one = launches * issue, device / max(1.0, launches)
        return cls(device, host, max(min(issue, host) + device, host + one))

    def then(self, after: Issued) -> Issued:
        """These kernels, then others."""
        return Issued(
            self.device + after.device,
            self.host + after.host,
            max(self.whole + after.device, self.host + after.whole),
        )

    def end(self, device: float, host: float) -> float:
        """When the device ends that was free at ``device``, with a host that begins at ``host``."""
        return max(device + self.device, host + self.whole)
