"""Schedules: every program has one, it is proved, and a wrong one is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import rvdcomm as rv
from rvdcomm.exports import Message, Schedule, Sum, Value, schedule_of
from rvdcomm.layout import Box
from tests.network.oracle import random_network
from tests.oracle import random_layout
from tests.plans.test_bundle import random_bundle

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schedule.schema.json").read_text())


def random_plan(seed: int) -> rv.Plan:
    """A plan of a random pair of layouts over some ranks of a random network or of two hosts."""
    rng = random.Random(seed)
    links = random_network(rng, range(rng.randint(2, 6)))
    if seed % 2:
        links = rv.Topology.preset("dgx-h100", 2, 3)
    ranks = [rng.sample(sorted(links.ranks), rng.randint(1, len(links.ranks))) for _ in range(2)]
    src, dst = (random_layout(rng, (12, 10), each) for each in ranks)
    return rv.plan(src, dst, "float32", links, executor=rng.choice(["auto", "dist", "peer"]))


def check(program: rv.Program) -> Schedule:
    schedule = schedule_of(program)
    schedule.prove()
    values = json.loads(json.dumps(schedule.to_json()))
    jsonschema.validate(values, SCHEMA)
    assert Schedule.from_json(values) == schedule
    return schedule


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_has_a_schedule_that_is_proved(seed):
    plan = random_plan(seed)
    schedule = check(plan.program)
    sent = sum(m.value.box.num_elements for each in schedule.rounds for m in each.messages)
    # What a backend sums is counted in chunks, and nobody sends zeros.
    assert sent * 4 <= plan.cost.wire_bytes


@pytest.mark.parametrize("seed", range(12))
def test_programs_of_many_tensors_have_schedules(seed):
    for program in random_bundle(seed).programs:
        check(program)


def test_the_rounds_are_those_of_the_trees():
    shape = (64,)
    src, dst = rv.Layout(shape, "R(1)V(1)D(8)"), rv.Layout(shape, "R(8)V(1)D(1)")
    plan = rv.plan(src, dst, "float32", rv.Topology.single_host(8, 1e-3, 1e9), executor="dist")
    assert len(schedule_of(plan.program).rounds) == plan.cost.rounds == 3


def all_reduce() -> Schedule:
    src, dst = rv.Layout((12,), "R(1)V(3)D(1)"), rv.Layout((12,), "R(3)V(1)D(1)")
    return schedule_of(rv.plan(src, dst, executor="dist").program)


def with_round(schedule: Schedule, number: int, **changed: object) -> Schedule:
    rounds = list(schedule.rounds)
    rounds[number] = replace(rounds[number], **changed)
    return replace(schedule, rounds=tuple(rounds))


def test_a_message_less_is_found():
    schedule = all_reduce()
    for number, each in enumerate(schedule.rounds):
        for i in range(len(each.messages)):
            left = (*each.messages[:i], *each.messages[i + 1 :])
            with pytest.raises(rv.ProgramError, match="has no"):
                with_round(schedule, number, messages=left).prove()


def test_a_part_that_is_added_twice_is_found():
    schedule = all_reduce()
    whole = Box((0,), (12,))
    twice = Sum(0, 0, whole, (0,), (0,))
    with pytest.raises(rv.ProgramError, match="adds parts twice"):
        with_round(schedule, 0, sums=(twice,)).prove()


def test_what_a_rank_does_not_have_is_not_sent():
    message = Message(0, 1, Value(0, Box((0,), (12,)), (0, 1)))
    with pytest.raises(rv.ProgramError, match=r"rank 0 has no \[0:12\]"):
        with_round(all_reduce(), 0, messages=(message,)).prove()


def test_outputs_have_to_be_whole_equal_and_complete():
    schedule = all_reduce()
    (tensor,) = schedule.tensors

    def changed(values: tuple[Value, ...], rank: int = 0) -> Schedule:
        outputs = list(tensor.outputs)
        outputs[rank] = replace(outputs[rank], values=values)
        return replace(schedule, tensors=(replace(tensor, outputs=tuple(outputs)),))

    whole = Box((0,), (12,))
    with pytest.raises(rv.ProgramError, match="do not tile"):
        changed(()).prove()
    with pytest.raises(rv.ProgramError, match="differ"):
        changed((Value(0, whole, (1,)),), rank=1).prove()
    alone = replace(tensor, outputs=(replace(tensor.outputs[0], values=(Value(0, whole, (0,)),)),))
    with pytest.raises(rv.ProgramError, match="not added just once"):
        replace(schedule, tensors=(alone,)).prove()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "x"),
        (("version",), 2),
        (("dtype",), "float99"),
        (("tensors",), {}),
        (("tensors", 0, "shape"), [13]),
        (("tensors", 0, "dims"), [[-1]]),
        (("tensors", 0, "inputs", 0, "rank"), -1),
        (("tensors", 0, "inputs", 0, "rank"), 1),
        (("tensors", 0, "inputs", 0, "part"), True),
        (("tensors", 0, "inputs", 0, "box"), [[3, 2]]),
        (("tensors", 0, "outputs", 0, "values", 0, "parts"), [1, 0]),
        (("rounds", 0, "messages", 0, "tensor"), 1),
        (("rounds", 0, "messages", 0, "box"), []),
        (("rounds", 0, "messages", 0, "parts"), None),
        (("rounds", 1, "sums", 0, "terms"), [[0]]),
    ],
)
def test_files_are_not_trusted(path, value):
    values = json.loads(json.dumps(all_reduce().to_json()))
    at = values
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises((rv.LayoutError, rv.ProgramError)):
        Schedule.from_json(values).prove()


def test_a_program_of_one_rank_has_no_schedule():
    src, dst = rv.Layout((8,), "R(1)V(1)D(2)"), rv.Layout((8,), "R(2)V(1)D(1)")
    with pytest.raises(rv.ProgramError, match="some ranks"):
        schedule_of(rv.plan(src, dst, executor="dist").program_of(0))


def test_a_schedule_without_outputs_is_refused():
    schedule = schedule_of(random_plan(0).program)
    (tensor,) = schedule.tensors
    with pytest.raises(rv.ProgramError, match="the outputs of tensor 0 leave some of it out"):
        replace(schedule, tensors=(replace(tensor, outputs=()),)).prove()
