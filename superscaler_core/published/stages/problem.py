"""StageProblem: layers with their costs, and the devices over which a model is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from rvdcomm.units import bytes_text
from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.published.stages.cut import PlacedStage, StageCut, devices_of_stages
from superscaler_core.published.stages.degrees import Degrees

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The time and memory of a layer with given degrees, on the device where they are largest.

    Attributes:
        forward_secs, backward_secs: seconds per microbatch, with the communication in the layer.
        sync_secs: seconds once per step: fetching its weights, reducing its gradients, and its part
            of the update.
        resting_bytes: bytes of weights, gradients and optimizer states.
        kept_bytes: bytes that a microbatch keeps from its forward to its backward.
        work_bytes: the most bytes that one microbatch needs in addition, while it runs.
    """

    forward_secs: float
    backward_secs: float
    sync_secs: float = 0.0
    resting_bytes: float = 0.0
    kept_bytes: float = 0.0
    work_bytes: float = 0.0

    @property
    def secs(self) -> float:
        """Seconds per microbatch, forward and backward."""
        return self.forward_secs + self.backward_secs


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of a model that no planner divides.

    Attributes:
        name: for people.
        costs: one for each of the problem's degrees; None where the layer cannot be cut so.
        weight_bytes: bytes of its parameters, before any split.
        out_bytes: bytes of its results that other layers read, for a whole microbatch.
        change_secs: extra seconds per microbatch if the layer before has other degrees on as many
            devices, ``[from][to]``; all zero if empty.
    """

    name: str
    costs: tuple[LayerCost | None, ...]
    weight_bytes: float = 0.0
    out_bytes: float = 0.0
    change_secs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class StageProblem:
    """A model to be cut into stages, and the devices on which the stages may run.

    All planners of this folder solve this problem; their objectives differ. A microbatch goes
    through all stages, and the replicas of a stage share it. Stages run in the order of 1F1B, so a
    stage keeps one microbatch for every stage from it to the last, and at most all microbatches.

    Laws (tests/superscaler_core/planners): a stage fits exactly where ``Candidates.most_behind``
    says so; for a cut of a captured model, ``step_secs`` and ``stage_bytes`` are near the results
    of the simulator and the memory reader.

    Attributes:
        layers: in an order in which a model can run them.
        edges: pairs of layers (writer, reader); the writer comes first.
        degrees: the degrees that a stage may have.
        devices: in the order of their numbers; every host has ``per_host`` of them.
        per_host: devices of a host.
        inner_bytes_per_sec, outer_bytes_per_sec: bandwidth of a device inside its host, and of a
            host to other hosts.
        microbatches: microbatches in a step.
        memory_bytes: memory of a device.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    degrees: tuple[Degrees, ...]
    devices: tuple[Device, ...]
    per_host: int
    inner_bytes_per_sec: float
    outer_bytes_per_sec: float
    microbatches: int
    memory_bytes: float = float("inf")

    def __post_init__(self) -> None:
        num = len(self.layers)
        backward = [edge for edge in self.edges if not 0 <= edge[0] < edge[1] < num]
        if not num or backward:
            raise PlanError(
                f"stage problem of {num} layers with edges {backward}: there is a layer at least, "
                "and an edge goes from a layer to a later one."
            )
        if any(len(layer.costs) != len(self.degrees) for layer in self.layers):
            raise PlanError(f"every layer has a cost for each of the {len(self.degrees)} degrees.")
        if self.microbatches < 1 or not self.devices or self.per_host < 1:
            raise PlanError("a stage problem has a microbatch, a device and a device a host.")

    @classmethod
    def chain(cls, layers: Sequence[Layer], *args: object, **rest: object) -> StageProblem:
        """A problem in which every layer reads the layer before it."""
        edges = tuple((i, i + 1) for i in range(len(layers) - 1))
        return cls(tuple(layers), edges, *args, **rest)  # type: ignore[arg-type]

    def with_degrees(self, chosen: Sequence[Degrees]) -> StageProblem:
        """The same problem with only some of its degrees."""
        numbers = [self.degrees.index(each) for each in chosen]
        layers = [
            replace(
                layer,
                costs=tuple(layer.costs[a] for a in numbers),
                change_secs=tuple(tuple(row[b] for b in numbers) for row in changes),
            )
            for layer in self.layers
            for changes in [[layer.change_secs[a] for a in numbers] if layer.change_secs else []]
        ]
        return replace(self, layers=tuple(layers), degrees=tuple(chosen))

    def no_cut(self, planner: str) -> PlanError:
        """The error of a planner that finds no cut."""
        return PlanError(
            f"{planner} finds no cut of {len(self.layers)} layers on {self.num_devices} devices "
            f"of {bytes_text(int(self.memory_bytes)) if isfinite(self.memory_bytes) else 'any'} "
            "memory; use more devices, smaller microbatches, or keep less for the backward."
        )

    # --- devices --------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def bytes_per_sec(self, num_devices: int) -> float:
        """The bandwidth among ``num_devices``: between hosts if they do not fit in one host."""
        inside = num_devices <= self.per_host
        return self.inner_bytes_per_sec if inside else self.outer_bytes_per_sec

    def transfer_secs(self, num_bytes: float) -> float:
        """Seconds to move bytes of a microbatch to the next stage, and their gradient back."""
        return 2 * num_bytes / self.bytes_per_sec(self.num_devices)

    # --- layers ---------------------------------------------------------------------------------

    def table(self, attribute: str) -> Array:
        """An attribute of all costs, ``[layer, degrees]``; infinite where there is no cost."""
        rows = [
            [float("inf") if cost is None else getattr(cost, attribute) for cost in layer.costs]
            for layer in self.layers
        ]
        return np.array(rows, dtype=float)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """For every layer the layers that read it, as bits."""
        found = [0] * len(self.layers)
        for writer, reader in self.edges:
            found[writer] |= 1 << reader
        return tuple(found)

    def crossing_bytes(self, layers: int) -> tuple[float, float]:
        """The bytes of a microbatch that enter a set of layers, and those that leave it.

        A result that several layers of the set read enters once.

        Args:
            layers: the set, as bits.
        """
        entering = leaving = 0.0
        for index, layer in enumerate(self.layers):
            is_inside = layers >> index & 1
            if is_inside and self.readers[index] & ~layers:
                leaving += layer.out_bytes
            elif not is_inside and self.readers[index] & layers:
                entering += layer.out_bytes
        return entering, leaving

    # --- stages ---------------------------------------------------------------------------------

    def costs(self, stage: PlacedStage) -> list[LayerCost]:
        """The costs of a stage's layers.

        Raises:
            PlanError: a layer cannot have its degrees.
        """
        found = []
        for layer, degrees in zip(stage.layers, stage.degrees, strict=True):
            number = self.degrees.index(degrees) if degrees in self.degrees else None
            cost = None if number is None else self.layers[layer].costs[number]
            if cost is None:
                raise PlanError(f"layer {self.layers[layer].name} cannot have degrees {degrees}.")
            found.append(cost)
        return found

    def change_secs(self, layers: Sequence[int], degrees: Sequence[Degrees]) -> float:
        """Seconds per microbatch between layers of a stage that have different degrees."""
        numbers = [self.degrees.index(each) for each in degrees]
        pairs = zip(layers[1:], numbers, numbers[1:], strict=False)
        return sum(
            self.layers[layer].change_secs[a][b] if self.layers[layer].change_secs else 0.0
            for layer, a, b in pairs
            if a != b
        )

    def stage_bytes(self, stage: PlacedStage, num_behind: int) -> float:
        """The memory of a stage's fullest device, if ``num_behind`` stages come after the stage."""
        costs = self.costs(stage)
        in_flight = min(num_behind + 1, self.microbatches)
        kept = sum(cost.resting_bytes + in_flight * cost.kept_bytes for cost in costs)
        return kept + max(cost.work_bytes for cost in costs)

    def fits(self, stages: Sequence[PlacedStage]) -> bool:
        """Whether every stage has memory for its microbatches."""
        behind = range(len(stages) - 1, -1, -1)
        pairs = zip(stages, behind, strict=True)
        return all(self.stage_bytes(stage, num) <= self.memory_bytes for stage, num in pairs)

    def step_secs(self, cut: StageCut) -> float:
        """Seconds of a step in the order of 1F1B, by one estimate for the cuts of all planners.

        The estimate is the sum of three times: one microbatch through all stages, the slowest stage
        for all other microbatches, and the longest reduction of gradients. Source: Alpa's objective
        (Zheng et al., 2022), plus transfers between stages and reductions.
        """
        secs, syncs = [], []
        for stage in cut.stages:
            costs = self.costs(stage)
            changes = self.change_secs(stage.layers, stage.degrees)
            secs.append(sum(cost.secs for cost in costs) + changes)
            syncs.append(sum(cost.sync_secs for cost in costs))
        sets = [sum(1 << layer for layer in stage.layers) for stage in cut.stages]
        moved = sum(self.transfer_secs(self.crossing_bytes(each)[0]) for each in sets)
        return sum(secs) + moved + (self.microbatches - 1) * max(secs) + max(syncs)

    # --- results --------------------------------------------------------------------------------

    def placed(
        self, stages: Iterable[tuple[Iterable[int], Degrees | Sequence[Degrees]]], objective: float
    ) -> StageCut:
        """A cut on this problem's devices.

        Args:
            stages: layers and degrees of every stage, in order; one value of degrees for all layers
                of a stage, or one for each.
            objective: as in ``StageCut``.
        """
        chosen: list[tuple[tuple[int, ...], tuple[Degrees, ...]]] = []
        for layers, degrees in stages:
            mine = tuple(layers)
            many = (degrees,) * len(mine) if isinstance(degrees, Degrees) else tuple(degrees)
            chosen.append((mine, many))
        sizes = [degrees[0].num_devices for _, degrees in chosen]
        placed = devices_of_stages(sizes, self.devices)
        return StageCut(
            tuple(
                PlacedStage(layers, devices, degrees)
                for devices, (layers, degrees) in zip(placed, chosen, strict=True)
            ),
            objective,
        )
