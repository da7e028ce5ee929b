"""StageCut: the stages that a planner chose, as a value with a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.published.stages.degrees import Degrees


def devices_of_stages(sizes: Sequence[int], devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    """The devices of every stage, which takes consecutive ones.

    Larger stages are placed first, so that a stage whose size is a power of two spans hosts only if
    it has to.

    Args:
        sizes: number of devices of every stage.
        devices: at least as many devices.

    >>> devices_of_stages([1, 2, 1], range(4))
    [(2,), (0, 1), (3,)]
    """
    found: dict[int, tuple[Device, ...]] = {}
    used = 0
    for stage in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[stage] = tuple(devices[used : used + sizes[stage]])
        used += sizes[stage]
    return [found[stage] for stage in range(len(sizes))]


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """One stage: layers that run together on the same devices.

    Attributes:
        layers: numbers of the layers, ascending.
        devices: as many devices as the degrees need.
        degrees: the degrees of every layer.
    """

    layers: tuple[int, ...]
    devices: tuple[Device, ...]
    degrees: tuple[Degrees, ...]

    def __post_init__(self) -> None:
        is_ascending = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        if not self.layers or not is_ascending or len(self.degrees) != len(self.layers):
            raise PlanError(
                f"stage of layers {self.layers}: they ascend, and each has degrees of its own."
            )
        wrong = [each for each in self.degrees if each.num_devices != len(self.devices)]
        if wrong:
            raise PlanError(
                f"stage of layers {_ranges(self.layers)}: degrees {wrong[0]} need "
                f"{wrong[0].num_devices} devices, but {len(self.devices)} were given."
            )

    def __str__(self) -> str:
        same = len(set(self.degrees)) == 1
        degrees = " ".join(map(str, self.degrees[:1] if same else self.degrees))
        return f"stage {_ranges(self.layers)} on {_ranges(self.devices)} as {degrees}"

    @classmethod
    def parse(cls, text: str) -> PlacedStage:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form.
        """
        words = text.split()
        if len(words) < 6 or (words[0], words[2], words[4]) != ("stage", "on", "as"):
            raise PlanError(f"{text!r}: expected 'stage LAYERS on DEVICES as DEGREES'.")
        layers = _numbers(words[1])
        degrees = tuple(map(Degrees.parse, words[5:]))
        many = degrees * len(layers) if len(degrees) == 1 else degrees
        return cls(layers, _numbers(words[3]), many)


@dataclass(frozen=True, slots=True)
class StageCut:
    r"""Stages of a model, in the order in which a microbatch visits them.

    Laws (tests/superscaler_core/published/stages): ``StageCut.parse(str(x)) == x``;
    every layer is in one stage, and every device in at most one.

    >>> cut = StageCut.parse("cut 7.5\nstage 0-1 on 0 as 1x1\nstage 2 on 2-3 as 2x1")
    >>> cut.stages[1].degrees
    (Degrees(data=2, tensor=1),)

    Attributes:
        stages: in order.
        objective: the value that the planner minimized, in seconds; planners' objectives differ.
    """

    stages: tuple[PlacedStage, ...]
    objective: float

    def __post_init__(self) -> None:
        layers = sorted(layer for stage in self.stages for layer in stage.layers)
        devices = [device for stage in self.stages for device in stage.devices]
        if layers != list(range(len(layers))) or len(set(devices)) != len(devices) or not layers:
            raise PlanError(
                f"a cut with layers {layers} on devices {devices}: every layer is in one stage, "
                "and every device in one at most."
            )

    def __str__(self) -> str:
        return "\n".join([f"cut {self.objective!r}", *map(str, self.stages)])

    @classmethod
    def parse(cls, text: str) -> StageCut:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form.
        """
        head, *lines = text.strip().splitlines() or [""]
        word, _, number = head.partition(" ")
        try:
            objective = float(number) if word == "cut" else None
        except ValueError:
            objective = None
        if objective is None:
            raise PlanError(f"a cut begins with 'cut SECONDS', and not with {head!r}.")
        return cls(tuple(map(PlacedStage.parse, lines)), objective)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of every stage."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def has_runs(self) -> bool:
        """Whether every stage is a run of layers that begins where the stage before ends."""
        return [i for stage in self.stages for i in stage.layers] == list(range(sum(self.sizes)))


def _ranges(numbers: Iterable[int]) -> str:
    """The text of numbers in their order, with runs shortened: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last or "0").isdecimal():
            raise PlanError(f"{text!r}: expected numbers and ranges, such as 0-3,8.")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
