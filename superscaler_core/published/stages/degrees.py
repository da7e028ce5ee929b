"""Degrees: how many devices share a layer's batch, and how many its features."""

from __future__ import annotations

from dataclasses import dataclass

from superscaler_core.errors import PlanError


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """Data-parallel and tensor-parallel degrees: ``2x4`` is two replicas of four devices each.

    Law (tests/superscaler_core/published/stages): ``Degrees.parse(str(x)) == x``.

    Attributes:
        data: replicas, which share a microbatch.
        tensor: devices of a replica, which share the inner features.
    """

    data: int
    tensor: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.tensor < 1:
            raise PlanError(f"degrees {self}: both are at least 1.")

    @property
    def num_devices(self) -> int:
        """The devices of a stage with these degrees."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"

    @classmethod
    def parse(cls, text: str) -> Degrees:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form.
        """
        data, _, tensor = text.partition("x")
        if not (data.isdecimal() and tensor.isdecimal()):
            raise PlanError(f"degrees {text!r}: expected DATAxTENSOR, such as 2x4.")
        return cls(int(data), int(tensor))

    @classmethod
    def powers_of_two(cls, num_devices: int) -> tuple[Degrees, ...]:
        """All degrees that are powers of two, on at most ``num_devices``, fewest devices first.

        >>> [str(each) for each in Degrees.powers_of_two(2)]
        ['1x1', '1x2', '2x1']
        """
        powers = [1 << i for i in range(num_devices.bit_length())]
        found = [cls(data, tensor) for data in powers for tensor in powers]
        fits = (each for each in found if each.num_devices <= num_devices)
        return tuple(sorted(fits, key=lambda each: (each.num_devices, each)))
