"""The shared-memory protocol in every interleaving; the explorer finds broken protocols, too."""

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
AHEAD_FROM_THE_START = Scenario((("aside",) * 4,) * 2)


def name_of(scenario: Scenario) -> str:
    return f"{scenario.calls[0]}, last {scenario.calls[-1]}, {scenario.num_faults} faults"


@pytest.mark.parametrize(
    "scenario", [*OF_TWO, *OF_THREE, RUNNING_AHEAD, AHEAD_FROM_THE_START], ids=name_of
)
def test_calls_never_return_wrong_data_or_wait_for_a_failed_rank(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.violations == []
    assert found.outcomes


def test_a_rank_may_return_although_another_one_raises() -> None:
    found = explore(Scenario((("in place",),) * 2, num_faults=1))
    assert {(("returned",), ("raised",)), (("raised",), ("raised",))} <= found.outcomes


@pytest.mark.parametrize("calls", [("staged", "in place", "staged"), ("in place", "in place")])
def test_all_later_calls_raise_after_both_ranks_raised(calls: tuple[str, ...]) -> None:
    # The last rank makes another first call. Both ranks raise, there and in all later calls.
    odd = ("one way", *calls[1:])
    for outcomes in explore(Scenario((calls, odd))).outcomes:
        assert outcomes == (("raised",) * len(calls),) * 2


# By check: a scenario that goes wrong if the protocol leaves out the check, and the violation.
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
def test_explorer_finds_a_violation_for_every_missing_check(check: str) -> None:
    scenario, fault = MUTATIONS[check]
    assert explore(scenario).violations == []
    violation, *_ = explore(replace(scenario, checks=CHECKS - {check})).violations
    assert fault in violation


def test_explorer_finds_wrong_data_if_no_check_is_made() -> None:
    """Two ranks make different calls, which raise. In a later call one of them gets mixed data."""
    calls = ("staged", "mixed", "staged")
    scenario = Scenario((calls, (calls[0], "one way", calls[2])), checks=frozenset())
    assert any("returns" in violation for violation in explore(scenario).violations)
