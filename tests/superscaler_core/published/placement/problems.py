"""Small random placement problems, and an event-by-event simulation of their assignments."""

from __future__ import annotations

from math import inf

import numpy as np

from superscaler_core.published.placement import Operation, OperationResult, PlacementProblem


def random_problem(
    seed: int, *, most: int = 7, devices: tuple[int, ...] = (2, 3), has_memory: bool | None = None
) -> PlacementProblem:
    """A random problem with whole seconds, so that sums are exact; devices differ in speed.

    In half of the problems, operations share groups.
    """
    random = np.random.default_rng(seed)
    num, many = int(random.integers(2, most + 1)), int(random.choice(devices))
    groups = random.integers(0, num, num)
    is_grouped = random.random() < 0.5
    operations = [
        Operation(
            f"op{i}",
            tuple(map(float, random.integers(1, 12, many))),
            float(random.integers(1, 9)),
            f"g{groups[i]}" if is_grouped else "",
        )
        for i in range(num)
    ]
    results = []
    for writer in range(num - 1):
        for _ in range(int(random.integers(0, 3))):
            later = [r for r in range(writer + 1, num) if random.random() < 0.5]
            if later:
                results.append(OperationResult(writer, tuple(later), float(random.integers(0, 6))))
    total = sum(op.held_bytes for op in operations)
    is_tight = random.random() < 0.3 if has_memory is None else has_memory
    return PlacementProblem(
        tuple(operations),
        tuple(results),
        random.integers(0, 4, (many, many)).astype(float),
        random.choice([0.5, 1.0, 2.0], (many, many)),
        # The first device always has memory for all operations.
        (total, *(float(random.integers(1, total + 1)) if is_tight else inf,) * (many - 1)),
    )


def events(problem: PlacementProblem, assignment: tuple[int, ...]) -> list[float]:
    """The end time of every operation, simulated with a clock and queues of devices and ports.

    This shares no code with the planners' simulation. A job (an operation or a transfer) starts
    when its inputs are ready and it is first in the queues of all devices and ports that it
    occupies.
    """
    at = [assignment[group] for group in problem.group_of]
    # The value of a job: the jobs that it waits for, its devices or ports, and its seconds.
    jobs: dict[object, tuple[set[object], list[object], float]] = {}
    for number, op in enumerate(problem.operations):
        waits: set[object] = set()
        for i, result in enumerate(problem.results):
            if number in result.readers:
                away = at[result.writer] != at[number]
                waits.add((i, at[number]) if away else result.writer)
        jobs[number] = waits, [("device", at[number])], op.secs[at[number]]
    for writer in range(len(at)):
        for i, result in enumerate(problem.results):
            for dst in sorted({at[r] for r in result.readers} - {at[writer]}):
                if result.writer == writer:
                    src = at[writer]
                    speed = problem.bytes_per_sec[src, dst]
                    secs = problem.latency_secs[src, dst] + result.num_bytes / speed
                    jobs[i, dst] = {writer}, [("out", src), ("in", dst)], secs
    queues: dict[object, list[object]] = {}
    for name, (_, ports, _) in jobs.items():
        for port in ports:
            queues.setdefault(port, []).append(name)
    ends: dict[object, float] = {}
    running: dict[object, float] = {}
    now = 0.0
    while len(ends) < len(jobs):
        is_idle = True
        for name, (waits, ports, secs) in jobs.items():
            heads = all(queues[port] and queues[port][0] == name for port in ports)
            if name not in running and name not in ends and heads and waits <= ends.keys():
                running[name], is_idle = now + secs, False
        if is_idle or 0.0 in {end - now for end in running.values()}:
            now = min(running.values())
        for name in [name for name, end in running.items() if end == now]:
            ends[name] = running.pop(name)
            for port in jobs[name][1]:
                queues[port].pop(0)
    return [ends[number] for number in range(len(at))]
