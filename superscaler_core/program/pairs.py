"""Pairs: a forward and the backward of another microbatch, overlapped in one run of a worker.

Source: DualPipe (DeepSeek-AI, DeepSeek-V3 technical report, 2024): the two actions of a pair hide
each other's communication inside stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from superscaler_core.program.duplex import joined, overlapped
from superscaler_core.program.event import Event, OverlappedPair, Pair, pair_of
from superscaler_core.program.instruction import Block
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.verb import MOVES
from superscaler_core.schedules import Action


def overlap_pairs(program: StepProgram, pairs: Iterable[tuple[Action, Action]]) -> StepProgram:
    """Run the two actions of each pair as one: while one communicates, the other one computes.

    A pair without communication inside its stages stays as it is.

    Laws (tests/superscaler_core/program/test_pairs.py): either action of a pair runs the
    instructions of its block in their order; all that a pair reads comes before it.

    Args:
        program: the actions of a pair are on the same devices, and begin at the same time: between
            them in the order is nothing that the second one waits for (``step_events``).
        pairs: pairs of the program's actions that are next to each other in their worker's row.
    """
    given = [OverlappedPair(first, second) for first, second in pairs]
    blocks: dict[Pair, Block] = {}
    for key in sorted({pair_of(pair) for pair in given}):
        both = [program.blocks[end] for end in key]
        if any(i.kind in MOVES and not i.stays for block in both for i in block):
            first, second = (
                tuple(replace(i, half=half) for i in block) for half, block in enumerate(both)
            )
            blocks[key] = joined(overlapped(first, second, shared=()))
    hiding = [pair for pair in given if pair_of(pair) in blocks]
    pair_with = {action: pair for pair in hiding for action in (pair.first, pair.second)}
    events: list[Event] = []
    done: set[OverlappedPair] = set()
    for event in program.events:
        pair = pair_with.get(event) if isinstance(event, Action) else None
        # A pair takes the place of its first action in the order.
        if pair is None or pair not in done:
            events.append(pair or event)
        done |= {pair} if pair else set()
    return replace(program, events=tuple(events), pairs=blocks)
