"""The protocol of shared memory in every interleaving; the explorer also sees broken protocols."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.run.shared_memory.model import CHECKS, Scenario, explore, scenarios

OTHERS = ("in place", "mixed", "staged", "one way")
OF_TWO = [
    *scenarios(2, ("in place", "staged", "in place"), OTHERS),
    *scenarios(2, ("mixed", "in place", "mixed"), OTHERS),
    *scenarios(2, ("staged", "alone", "in place"), ("one way", "alone, long")),
    *scenarios(2, ("alone", "alone", "in place", "staged"), ("alone, long",)),
    Scenario((("in place", "staged"),) * 2, num_faults=2),
]
OF_THREE = [
    *scenarios(3, ("in place",), OTHERS),
    *scenarios(3, ("mixed",), OTHERS),
    *(each for each in scenarios(3, ("staged", "in place"), OTHERS) if not each.num_faults),
]
RUNNING_AHEAD = Scenario((("staged", "alone", "alone", "alone", "alone", "staged"),) * 2)


def name_of(scenario: Scenario) -> str:
    return f"{scenario.calls[0]}, last {scenario.calls[-1]}, {scenario.num_faults} faults"


@pytest.mark.parametrize("scenario", [*OF_TWO, *OF_THREE, RUNNING_AHEAD], ids=name_of)
def test_no_call_returns_other_data_and_nobody_waits_for_a_rank_that_failed(
    scenario: Scenario,
) -> None:
    found = explore(scenario)
    assert found.violations == []
    assert found.outcomes


def test_a_rank_may_return_although_another_one_raises() -> None:
    found = explore(Scenario((("in place",),) * 2, num_faults=1))
    assert {(("returned",), ("raised",)), (("raised",), ("raised",))} <= found.outcomes


@pytest.mark.parametrize("calls", [("staged", "in place", "staged"), ("in place", "in place")])
def test_after_a_failure_that_all_have_seen_no_call_returns(calls: tuple[str, ...]) -> None:
    # The last rank makes another first call; where both raise, both raise in all later calls.
    odd = ("one way", *calls[1:])
    for outcomes in explore(Scenario((calls, odd))).outcomes:
        assert outcomes == (("raised",) * len(calls),) * 2


# What goes wrong if the protocol leaves a check out, and the scenario that shows it.
MUTATIONS = {
    "history": (Scenario((("in place", "staged"), ("staged", "staged"))), "returns"),
    "chain": (
        Scenario((("alone", "alone", "mixed"), ("alone, long", "alone", "mixed"))),
        "returns",
    ),
    "end": (Scenario((("in place", "in place"),) * 2, num_faults=1), "returns"),
    "readers": (Scenario((("in place", "in place"),) * 2), "returns"),
    "near": (RUNNING_AHEAD, "raised without any fault"),
}


@pytest.mark.parametrize("check", MUTATIONS)
def test_the_explorer_finds_what_a_missing_check_lets_through(check: str) -> None:
    scenario, fault = MUTATIONS[check]
    assert explore(scenario).violations == []
    violation, *_ = explore(replace(scenario, checks=CHECKS - {check})).violations
    assert fault in violation


def test_the_explorer_finds_the_fault_that_counts_alone_had() -> None:
    """Ranks in different calls, all of which raise, call again: one of them got mixed data."""
    calls = ("staged", "mixed", "staged")
    scenario = Scenario((calls, (calls[0], "one way", calls[2])), checks=frozenset())
    assert any("returns" in violation for violation in explore(scenario).violations)
