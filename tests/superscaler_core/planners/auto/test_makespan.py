"""Laws of steps in time: they are those of the schedule, and of what moves between its stages."""

from __future__ import annotations

from itertools import count, product
from random import Random

import pytest

from superscaler_core.cost import CommCost
from superscaler_core.planners.auto.order import Send, WorkerRoute, events_of, makespan
from superscaler_core.schedules import SCHEDULES, ActionKind, generate, timeline

NAMES = ("interleaved", "zero-bubble", "zero-bubble-h2", "zero-bubble-v", "chimera", "dualpipe-v")


def wire(ticks: int, port: int = 0) -> CommCost:
    """A call that keeps a link between hosts busy all the time."""
    return CommCost((0, 1), ticks, (((1, port, "out"), ticks),), (0, 1), 1)


@pytest.mark.parametrize("name, seed", [*zip(NAMES, count())])
def test_step_without_transfers_takes_as_long_as_its_timeline(name: str, seed: int) -> None:
    schedule, random = generate(SCHEDULES[name], 4, 8), Random(seed)
    kinds, stages = list(ActionKind), range(schedule.num_stages)
    durations = {key: random.randint(1, 9) for key in product(kinds, stages)}
    events = events_of(schedule)
    comm_costs = {event.route: () for event in events if isinstance(event, Send)}
    found = makespan(events, schedule.num_workers, durations, comm_costs)
    assert found == timeline(schedule, durations).makespan


def test_transfers_of_a_microbatch_are_between_its_stages() -> None:
    schedule = generate(SCHEDULES["interleaved"], 2, 1)
    durations = {(kind, stage): 10 for kind in ActionKind for stage in range(2)}
    comm_costs = {WorkerRoute(0, 0, 1, False): [wire(3)], WorkerRoute(0, 1, 0, True): [wire(4)]}
    assert makespan(events_of(schedule), 2, durations, comm_costs) == 4 * 10 + 3 + 4


def test_transfers_wait_for_each_other_on_the_same_link() -> None:
    schedule = generate(SCHEDULES["gpipe"], 2, 8)
    durations = {(kind, stage): 1 for kind in ActionKind for stage in range(2)}
    events = events_of(schedule)
    comm_costs = {
        WorkerRoute(0, 0, 1, False): [wire(20)],
        WorkerRoute(0, 1, 0, True): [wire(20, port=1)],
    }
    # Each way, eight transfers follow one after another; one more time for all that computes.
    assert 2 * 8 * 20 < makespan(events, 2, durations, comm_costs) < (2 * 8 + 1) * 20
