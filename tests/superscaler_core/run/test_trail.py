"""``Trail``: says where a rank is in its step, and what it began before."""

from __future__ import annotations

import itertools

from superscaler_core.run.trail import MAX_MARKS, Trail


def test_position_of_communication_inside_a_stage_names_the_segment_before_it() -> None:
    def stage0_segment1() -> None: ...

    trail = Trail()
    assert trail.position == ""
    trail.note("forward", (stage0_segment1, 2))
    assert trail.position == "instruction 1: forward stage0_segment1 mb 2"
    trail.note("move", ("e3",))
    assert trail.position == "instruction 2: move e3, after forward stage0_segment1 mb 2"
    trail.note("p2p send", ("e4", 2))
    assert trail.position == "instruction 3: p2p send e4 mb 2"
    trail.restart()
    assert trail.position == ""


def test_a_trail_keeps_the_last_instructions_and_counts_all() -> None:
    trail = Trail()
    for mb in range(MAX_MARKS + 5):
        trail.note("receive", ("e1", mb))
    marks = list(trail)
    assert [mark.given[1] for mark in marks] == [*range(5, MAX_MARKS + 5)]
    assert trail.num == MAX_MARKS + 5
    assert all(a.since_ns <= b.since_ns for a, b in itertools.pairwise(marks))
