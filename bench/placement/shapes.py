"""Shapes: placement problems with the structure of an LSTM language model, NMT and Inception.

They are the three models of Mirhoseini et al., ICML 2017. The caller gives the times and sizes;
none of them is measured. All models have a backward, which takes twice as long as the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from superscaler_core.published.placement.problem import (
    Operation,
    OperationResult,
    PlacementProblem,
    with_backward,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Equal devices that are joined by equal links.

    Attributes:
        num_devices: number of devices.
        latency_secs, bytes_per_sec: latency and bandwidth of every link.
        memory_bytes: memory of a device.
    """

    num_devices: int = 2
    latency_secs: float = 50e-6
    bytes_per_sec: float = 10e9
    memory_bytes: float = float("inf")


@dataclass
class _Drawn:
    """A builder of a forward, which adds one operation after another."""

    operations: list[Operation] = field(default_factory=list)
    readers: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def add(
        self, name: str, group: str, secs: float, size: float, reads: Iterable[int], held: float
    ) -> int:
        number = len(self.operations)
        self.operations.append(Operation(name, (secs,), held, group))
        self.readers.append(())
        self.sizes.append(size)
        for writer in reads:
            self.readers[writer] += (number,)
        return number

    def on(self, machine: Machine) -> PlacementProblem:
        num = machine.num_devices
        forward = [
            Operation(op.name, op.secs * num, op.held_bytes, op.group) for op in self.operations
        ]
        results = [
            OperationResult(writer, readers, size)
            for writer, (readers, size) in enumerate(zip(self.readers, self.sizes, strict=True))
            if readers
        ]
        back = [tuple(2 * secs for secs in op.secs) for op in forward]
        operations, results_too = with_backward(forward, results, back)
        return PlacementProblem.of(
            operations,
            results_too,
            latency_secs=machine.latency_secs,
            bytes_per_sec=machine.bytes_per_sec,
            memory_bytes=machine.memory_bytes,
        )


def rnnlm(
    machine: Machine,
    *,
    layers: int = 2,
    steps: int = 20,
    runs: int = 2,
    cell_secs: float = 0.3e-3,
    state_bytes: float = 512e3,
) -> PlacementProblem:
    """An LSTM language model, unrolled: a grid of cells, and a softmax after every step.

    Args:
        machine: the devices.
        layers, steps: sizes of the grid.
        runs: groups per layer, each a run of consecutive steps; also groups of the softmax.
        cell_secs: forward seconds of a cell; a softmax takes twice as long.
        state_bytes: bytes of the state that a cell passes on.
    """
    drawn = _Drawn()
    before: dict[int, int] = {}
    for step in range(steps):
        run = step * runs // steps
        below: list[int] = []
        for layer in range(layers):
            name = f"layer{layer}.step{step}"
            reads = [*below, *([before[layer]] if layer in before else [])]
            before[layer] = drawn.add(
                name, f"layer{layer}.{run}", cell_secs, state_bytes, reads, 1.0
            )
            below = [before[layer]]
        drawn.add(f"softmax.step{step}", f"softmax.{run}", 2 * cell_secs, 0.0, below, 1.0)
    return drawn.on(machine)


def nmt(
    machine: Machine,
    *,
    layers: int = 2,
    steps: int = 12,
    runs: int = 2,
    cell_secs: float = 0.5e-3,
    state_bytes: float = 256e3,
) -> PlacementProblem:
    """An LSTM encoder and decoder as two grids, attention over all encoder steps, and a softmax.

    Args:
        machine: the devices.
        layers, steps: sizes of the encoder and of the decoder.
        runs: groups per layer, as in ``rnnlm``.
        cell_secs: forward seconds of a cell; attention takes as long, a softmax four times as long.
        state_bytes: bytes of the state that a cell passes on.
    """
    drawn = _Drawn()
    tops: list[int] = []
    before: dict[str, int] = {}
    for side in ("encoder", "decoder"):
        for step in range(steps):
            run = step * runs // steps
            below: list[int] = []
            for layer in range(layers):
                name = f"{side}.{layer}"
                # The decoder starts with the last state of the encoder.
                start = before.get(name, before.get(f"encoder.{layer}"))
                reads = [*below, *([] if start is None else [start])]
                before[name] = drawn.add(
                    f"{name}.step{step}", f"{name}.{run}", cell_secs, state_bytes, reads, 1.0
                )
                below = [before[name]]
            if side == "encoder":
                tops += below
                continue
            seen = drawn.add(
                f"attention.step{step}", f"attention.{run}", cell_secs, state_bytes,
                [*tops, *below], 1.0,
            )  # fmt: skip
            drawn.add(f"softmax.step{step}", f"softmax.{run}", 4 * cell_secs, 0.0, [seen], 1.0)
    return drawn.on(machine)


BRANCHES = ((1.0,), (0.5, 1.5), (0.5, 1.0, 1.0), (0.3, 0.7))
"""Times of the consecutive convolutions of each branch of a block, in units."""


def inception(
    machine: Machine,
    *,
    blocks: int = 4,
    branches: Sequence[Sequence[float]] = BRANCHES,
    unit_secs: float = 3e-3,
    image_bytes: float = 8e6,
) -> PlacementProblem:
    """A stem, blocks whose branches read one image and are joined, and a classifier.

    A branch is a group. The join is in the group of the next block's first branch.

    Args:
        machine: the devices.
        blocks: number of blocks.
        branches: branches of each block: the times of their convolutions, in units.
        unit_secs: forward seconds of a unit.
        image_bytes: bytes of a block's image; each branch produces an equal share.
    """
    drawn = _Drawn()
    image = drawn.add("stem", "block0.0", unit_secs, image_bytes, [], 1.0)
    for block in range(blocks):
        ends = []
        for number, parts in enumerate(branches):
            last = image
            for depth, units in enumerate(parts):
                name, group = f"block{block}.{number}.{depth}", f"block{block}.{number}"
                size = image_bytes / len(branches)
                last = drawn.add(name, group, units * unit_secs, size, [last], 1.0)
            ends.append(last)
        group = f"block{block + 1}.0" if block + 1 < blocks else "classifier"
        image = drawn.add(f"block{block}.join", group, 0.1 * unit_secs, image_bytes, ends, 1.0)
    drawn.add("classifier", "classifier", unit_secs, 0.0, [image], 1.0)
    return drawn.on(machine)
