"""An interpreter of MSCCL's XML: thread blocks take turns at random, queues hold few messages."""

from __future__ import annotations

import random
from collections import deque
from xml.etree import ElementTree

import numpy as np

BUFFERS = ("i", "o", "s")


def run(xml: str, inputs: list[np.ndarray], seed: int, queue: int = 1) -> list[np.ndarray]:
    """The output buffers, given each GPU's input buffer of equal chunks, all of one size.

    Raises:
        AssertionError: thread blocks wait for each other, or a step reads what was never written.
    """
    draw = random.Random(seed)
    root = ElementTree.fromstring(xml)
    gpus = [*root.iter("gpu")]
    assert len(gpus) == int(root.get("ngpus")) == len(inputs)
    memory: dict[tuple[int, str], np.ndarray] = {}
    blocks = {}
    queues: dict[tuple[int, int], deque] = {}
    for gpu in gpus:
        rank = int(gpu.get("id"))
        counts = {name: int(gpu.get(f"{name}_chunks")) for name in BUFFERS}
        size = len(inputs[rank]) // counts["i"]
        assert size * counts["i"] == len(inputs[rank])
        for name, count in counts.items():
            memory[rank, name] = np.full((count, size), np.nan)
        memory[rank, "i"][:] = inputs[rank].reshape(counts["i"], size)
        for block in gpu.iter("tb"):
            blocks[rank, int(block.get("id"))] = block, [*block.iter("step")]
    done = dict.fromkeys(blocks, 0)

    def place(rank: int, step: ElementTree.Element, side: str) -> np.ndarray:
        start, count = int(step.get(f"{side}off")), int(step.get("cnt"))
        found = memory[rank, step.get(f"{side}buf")][start : start + count]
        assert len(found) == count, "a step leaves its buffer"
        return found

    def may_run(rank: int, number: int) -> bool:
        block, steps = blocks[rank, number]
        step = steps[done[rank, number]]
        depid, deps = int(step.get("depid")), int(step.get("deps"))
        if depid >= 0:
            assert blocks[rank, depid][1][deps].get("hasdep") == "1"
            if done[rank, depid] <= deps:
                return False
        if step.get("type") == "s":
            return len(queues.setdefault((rank, int(block.get("send"))), deque())) < queue
        return step.get("type") != "r" or bool(queues.get((int(block.get("recv")), rank)))

    def run_step(rank: int, number: int) -> None:
        block, steps = blocks[rank, number]
        step = steps[done[rank, number]]
        done[rank, number] += 1
        kind = step.get("type")
        if kind == "nop":
            return
        if kind == "r":
            value = queues[int(block.get("recv")), rank].popleft()
            assert len(value) == int(step.get("cnt"))
        else:
            value = place(rank, step, "src").copy()
        assert not np.isnan(value).any(), "a step reads what was never written"
        if kind == "s":
            queues[rank, int(block.get("send"))].append(value)
        elif kind == "re":
            place(rank, step, "dst")[:] += value
        else:
            assert kind in ("cpy", "r")
            place(rank, step, "dst")[:] = value

    while left := [key for key, (_, steps) in blocks.items() if done[key] < len(steps)]:
        ready = [key for key in left if may_run(*key)]
        assert ready, "thread blocks wait for each other"
        run_step(*draw.choice(ready))
    assert not any(queues.values()), "a message was not received"
    return [memory[rank, "o"].reshape(-1) for rank in range(len(gpus))]
