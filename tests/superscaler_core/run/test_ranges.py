"""Ranges: a trace of torch's profiler has the instructions of a step by the names of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile

import superscaler_core as ss
from superscaler_core.program import COMPUTING, P2PSend, Verb
from superscaler_core.run.ranges import instruction
from superscaler_core.run.tables import RankEdge, SubTransfer, Tables
from superscaler_core.run.trail import Mark, Trail
from tests.superscaler_core.parallel.threads import on_threads
from tests.superscaler_core.run.test_results import batch, words

PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "pipeline": ("one_f_one_b", {"microbatches": 2}, 2),
    "gathered": ("zero3", {}, 2),
    "tensor": ("megatron", {"keep": ss.Keep.SEGMENT_INPUTS}, 2),
}

OF_SEGMENT = {
    Verb.FORWARD: "forward",
    Verb.COMPUTE: "compute",
    Verb.BACKWARD: "backward",
    Verb.BACKWARD_INPUTS: "backward inputs",
    Verb.BACKWARD_WEIGHTS: "backward weights",
    Verb.RECOMPUTE: "recompute",
}
OTHERS = {
    Verb.MOVE: "move",
    Verb.MOVE_BACK: "move back",
    Verb.FETCH: "fetch",
    Verb.UNSHARD: "unshard",
    Verb.REDUCE: "reduce",
    Verb.UPDATE: "update",
    Verb.LOSS: "total loss",
}


def named(size: int) -> dict[str, Tensor]:
    tokens, labels = batch(size, 0)
    return {"tokens": tokens, "labels": labels}


MOVED = SubTransfer("[0:8]", "R(1)V(1)D(2) shape(8)", "R(2)V(1)D(1) shape(8)", "float32")


@dataclass
class Moving:
    """What moves need of a rank."""

    trail: Trail
    tables: Tables

    @instruction(1)
    def move(self, name: str) -> None: ...

    @instruction(1)
    def move_back(self, name: str) -> None: ...

    @instruction(1)
    def wait_move(self, name: str) -> None: ...


class Found(NamedTuple):
    """The ranges of all ranks in a step, and the program that they ran."""

    ranges: Counter[str]
    compiled: ss.Compiled


def profiled(plan: str, options: dict[str, Any], num_ranks: int) -> Found:
    config = _ExperimentalConfig(profile_all_threads=True)
    trace = profile(activities=[ProfilerActivity.CPU], experimental_config=config)

    def work(parallel: ss.Parallel) -> Any:
        parallel.step(**named(4))
        for action in (trace.start, lambda: parallel.step(**named(4)), trace.stop):
            # The profiler sees what all ranks do between its start and its stop.
            parallel.trainer.calls.texts("")
            if action not in (trace.start, trace.stop) or parallel.trainer.rank == 0:
                action()
        return parallel.compiled

    compiled = on_threads(words(), named(4), num_ranks, work, plan=plan, options=options)[0]
    return Found(Counter(event.name.partition(": ")[0] for event in trace.events()), compiled)


def wanted(compiled: ss.Compiled) -> Iterator[str]:
    """The names of all ranges that the instructions of the step program ask for."""
    made = compiled.materialized
    for i, _, mb in compiled.step_program.everywhere():
        for device in () if i.stays else i.devices:
            if i.kind in COMPUTING:
                yield f"{OF_SEGMENT[i.kind]} {i.name} mb {mb}"
                if i.kind is Verb.BACKWARD and i.name in tables(compiled, device).recomputed:
                    yield f"recompute {i.name} mb {mb}"
            elif i.kind in (Verb.MOVE, Verb.MOVE_BACK):
                yield f"{OTHERS[i.kind]} {i.name}"
            elif i.kind is Verb.UPDATE:
                stored = tables(compiled, device).parameters
                names = [t.name for t in made.subject(i) if stored[t.name].box is not None]
                yield Mark("update", (names,), 0).text
            elif i.kind is Verb.LOSS:
                yield OTHERS[i.kind]
            elif i.kind in OTHERS:
                yield Mark(OTHERS[i.kind], (use_names(compiled, i, device),), 0).text
    for events in made.events_on.values():
        for event in events:
            if isinstance(event, P2PSend):
                yield f"p2p send{' back' * event.is_back} {event.name} mb {event.microbatch}"


def tables(compiled: ss.Compiled, device: int) -> Any:
    return compiled.executor(device).TABLES


def use_names(compiled: ss.Compiled, i: Any, device: int) -> list[str]:
    uses = compiled.materialized.uses_of(i)
    return [u.name for u in uses if device in u.storage.shards or device in u.sharding.shards]


@pytest.fixture(scope="module", params=PLANS)
def found(request: pytest.FixtureRequest) -> Found:
    return profiled(*PLANS[request.param])


def test_a_trace_has_a_range_for_every_instruction_of_the_step(found: Found) -> None:
    names = Counter(wanted(found.compiled))
    assert names
    first_words = {name.split()[0] for name in names}
    ours = {n: count for n, count in found.ranges.items() if n.split()[:1][0] in first_words}
    assert ours == names


def test_ranges_of_moves_say_between_which_layouts() -> None:
    edge = RankEdge(None, None, "float32", (MOVED,), (MOVED, MOVED))
    rank = Moving(Trail(), Tables(0, 1, 1, {}, "float32", (), {"e1": edge}))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        rank.move("e1")
        rank.move_back("e1")
        rank.wait_move("e1")
    names = [event.name for event in trace.events() if "e1" in event.name]
    assert names == ["move e1: R(1)V(1)D(2) -> R(2)V(1)D(1)", "move back e1: 2 regions",
                     "wait move e1"]  # fmt: skip


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch_profiler, "record_function", made.append)
    on_threads(words(), named(4), 2, lambda p: p.step(**named(4)), plan="megatron")
    assert made == []
