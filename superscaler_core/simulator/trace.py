"""Trace: a simulated step in Chrome's "Trace Event Format", with times in microseconds.

Every device is a process with two threads, and a counter of its memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rvdcomm.whole_file import replacing
from superscaler_core.cost.comm_cost import TICKS_PER_SEC
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.schedules.action import KINDS
from superscaler_core.simulator.account import Account
from superscaler_core.simulator.timeline import Ran, TimedSend

MICROS_PER_TICK = 1e6 / TICKS_PER_SEC

DOES, TRAVELS = 0, 1
"""Threads of a device: foreground, and communication in the background."""


def save_trace(account: Account, path: str | Path) -> None:
    """Write a trace, one event per line."""
    with replacing(path) as name, name.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, events(account))))
        file.write("\n]}\n")


def events(account: Account) -> Iterator[dict[str, Any]]:
    """All events of a trace."""
    for device in account.devices:
        yield _meta("process_name", device, DOES, f"device {device}")
        yield _meta("thread_name", device, DOES, "stages")
        yield _meta("thread_name", device, TRAVELS, "meanwhile")
    for ran in account.timeline.runs:
        yield from _ran(ran)
    for sent in account.timeline.sends:
        yield from _sent(sent)
    for device, series in account.live.items():
        for secs, num_bytes in series:
            time = {"ts": 1e6 * secs, "pid": device, "ph": "C", "name": "memory"}
            yield {**time, "args": {"MiB": num_bytes / 2**20}}


def _meta(name: str, device: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": device, "tid": thread, "args": {"name": text}}


def _span(
    name: str, category: str, device: int, thread: int, start: int, end: int, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": device, "tid": thread,
        "ts": start * MICROS_PER_TICK, "dur": (end - start) * MICROS_PER_TICK, "args": args,
    }  # fmt: skip


def _ran(ran: Ran) -> Iterator[dict[str, Any]]:
    event, inside = ran.event, ran.inside
    begins = dict.fromkeys(inside.devices, -1)
    for work_event, start, _ in inside.spans:
        for device in work_event.devices:
            if begins[device] < 0:
                begins[device] = start
    for device, end in zip(inside.devices, inside.ends, strict=True):
        if isinstance(event, Action) and begins[device] >= 0:
            times = ran.start + begins[device], ran.start + end
            args = {"stage": event.stage, "microbatch": event.microbatch}
            turn = f".{event.recycling_pass}" if event.kind is ActionKind.RECYCLE else ""
            name = f"{event.kind}{event.microbatch}{turn} of stage {event.stage}"
            yield _span(name, KINDS[event.kind], device, DOES, *times, **args)
    for work_event, start, end in inside.spans:
        category = "compute" if work_event.comm is None else "communication"
        for device in work_event.devices:
            times = ran.start + start, ran.start + end
            yield _span(work_event.name, category, device, DOES, *times)
    for work_event, start, end in inside.beside:
        assert work_event.comm is not None
        times, num_bytes = (ran.start + start, ran.start + end), sum(work_event.comm.level_bytes)
        for device in work_event.devices:
            yield _span(work_event.name, "communication", device, TRAVELS, *times, bytes=num_bytes)


def _sent(sent: TimedSend) -> Iterator[dict[str, Any]]:
    event, comm = sent.event, sent.comm
    name = f"{'gradient of ' if event.is_back else ''}{sent.tensor}"
    for device in comm.devices:
        yield _span(
            name, "communication", device, TRAVELS, sent.start, sent.end,
            bytes=sum(comm.level_bytes), microbatch=event.microbatch,
        )  # fmt: skip
