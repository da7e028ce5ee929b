"""Small random stage problems."""

from __future__ import annotations

from random import Random

from superscaler_core.published.stages import Degrees, Layer, LayerCost, StageProblem


def random_problem(seed: int, *, is_graph: bool = False, has_changes: bool = False) -> StageProblem:
    """A random problem of 2 to 4 layers on up to 4 devices; half of the problems limit memory."""
    draw = Random(seed)
    num_devices = draw.choice([2, 3, 4])
    sizes = [(d, t) for d in (1, 2, 3, 4) for t in (1, 2, 4) if d * t <= num_devices]
    chosen = {Degrees(1, 1), *(Degrees(d, t) for d, t in sizes if draw.random() < 0.7)}
    degrees = tuple(sorted(chosen))
    layers = tuple(_layer(draw, i, degrees, has_changes) for i in range(draw.randint(2, 4)))
    pairs = [(a, b) for b in range(len(layers)) for a in range(b)]
    edges = (
        tuple(pair for pair in pairs if draw.random() < 0.5)
        if is_graph
        else tuple((i, i + 1) for i in range(len(layers) - 1))
    )
    return StageProblem(
        layers,
        edges,
        degrees,
        tuple(range(num_devices)),
        per_host=draw.choice([1, 2, num_devices]),
        inner_bytes_per_sec=8.0,
        outer_bytes_per_sec=draw.choice([2.0, 8.0]),
        microbatches=draw.choice([1, 2, 4, 9]),
        memory_bytes=draw.choice([float("inf"), draw.uniform(10, 40)]),
    )


def _layer(draw: Random, index: int, degrees: tuple[Degrees, ...], has_changes: bool) -> Layer:
    secs, size = draw.randint(1, 20), draw.randint(1, 12)
    costs = tuple(
        None
        if each.num_devices > 1 and draw.random() < 0.1
        else LayerCost(
            forward_secs=secs / each.num_devices * draw.uniform(1, 1.5),
            backward_secs=draw.randint(1, 9) / each.num_devices,
            sync_secs=draw.randint(0, 9) * (each.data > 1),
            resting_bytes=size / each.tensor,
            kept_bytes=draw.randint(0, 6) / each.num_devices,
            work_bytes=draw.randint(0, 3),
        )
        for each in degrees
    )
    changes = tuple(tuple(float(draw.randint(0, 5)) for _ in degrees) for _ in degrees)
    return Layer(
        f"layer{index}", costs, draw.randint(0, 12), draw.randint(0, 9),
        changes if has_changes else (),
    )  # fmt: skip
