"""HiDup's dynamic programme finds the optimum; with one cost instead of two it does not."""

from __future__ import annotations

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.hidup import (
    Duplexed,
    DuplexStage,
    FormCall,
    FormProblem,
    Signature,
    hidup,
    least_secs,
    overlapped_secs,
)
from tests.superscaler_core.published.hidup.form_problems import (
    brute_force_secs,
    chain,
    chain_secs,
    random_problem,
)

NUM_CHAINS = 300


def one_cost(closed: Duplexed, stage: DuplexStage) -> tuple[float, ...]:
    """Only the time so far, which does not tell which of two strategies ends earlier."""
    return (closed.then(stage, "none").secs(),)


def test_dynamic_programme_needs_two_costs_to_solve_chains() -> None:
    """Two costs find the optimum of all chains. One cost and the best serial choice do not.

    An earlier count with another generator had 2,000 optima with two costs, 27 errors with one cost
    (the first at seed 18), and 1,187 worse serial choices. These counts cannot be repeated here,
    because that generator is not documented. Its ranges of costs, its order of draws, its rule for
    ties, and whether the first call may communicate are unknown.
    """
    wrong = serial_is_worse = 0
    for seed in range(NUM_CHAINS):
        problem = chain(seed)
        overlapped, serial = chain_secs(problem)
        best = overlapped.min()
        assert hidup(problem, backward="none").secs == best
        wrong += hidup(problem, backward="none", compared=one_cost).secs > best
        serial_is_worse += overlapped[serial.argmin()] > best
    assert (wrong, serial_is_worse) == (6, 154)


@pytest.mark.parametrize("seed", range(6))
def test_beam_with_a_bound_keeps_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed)
    best = brute_force_secs(problem, "woven", 3, counts_last=True)
    monkeypatch.setattr("superscaler_core.published.hidup.search.FIRST_BEAM", 1)
    assert hidup(problem, most_calls=3).secs == best


@pytest.mark.parametrize(
    ("backward", "most_calls", "counts_last"),
    [("none", None, True), ("committed", 1, True), ("woven", 2, True), ("woven", 2, False)],
)
def test_random_problems_equal_brute_force(
    backward: str, most_calls: int | None, counts_last: bool
) -> None:
    for seed in range(60):
        problem = random_problem(seed)
        best = brute_force_secs(problem, backward, most_calls, counts_last)
        strategy = hidup(problem, backward=backward, most_calls=most_calls, counts_last=counts_last)
        assert strategy.secs == best
        stages = [stage.work for stage in strategy.stages]
        assert overlapped_secs(stages, backward, counts_last=counts_last) == best
        assert len(strategy.signatures) == len(problem.calls)


@pytest.mark.parametrize("backward", ["none", "committed", "woven"])
@pytest.mark.parametrize("counts_last", [True, False])
def test_no_strategy_takes_less_than_the_bound(backward: str, counts_last: bool) -> None:
    gaps = []
    for seed in range(30):
        problem = random_problem(seed)
        best = brute_force_secs(problem, backward, None, counts_last)
        least = least_secs(problem, backward=backward, counts_last=counts_last)
        assert least <= best * (1 + 1e-9)
        gaps.append(least / best if best else 1.0)
    # The bound has to be near the optimum on average, as a bound of 0 would pass as well.
    assert sum(gaps) / len(gaps) > 0.4


def test_bound_without_communication_equals_the_optimum() -> None:
    signatures = tuple(Signature((), ("x",), DuplexStage(0, secs, 0, 2)) for secs in (3, 1))
    problem = FormProblem((FormCall("a", (), (0,), signatures),), {})
    assert least_secs(problem) == pytest.approx(hidup(problem).secs) == 6


def test_incompatible_forms_of_calls_raise_plan_error() -> None:
    writes, reads = (
        FormCall("a", (), (0,), (Signature((), ("cut",), DuplexStage()),)),
        FormCall("b", (0,), (), (Signature(("whole",), (), DuplexStage()),)),
    )
    with pytest.raises(PlanError, match="the signatures of 2 calls do not fit each other"):
        hidup(FormProblem((writes, reads), {}))


def test_call_that_reads_an_unwritten_tensor_is_rejected() -> None:
    reads = FormCall("b", (0,), (), (Signature(("whole",), (), DuplexStage()),))
    with pytest.raises(PlanError, match=r"call b: .* reads what calls before it wrote"):
        FormProblem((reads,), {})


def test_required_form_of_a_result_selects_the_signature() -> None:
    signatures = tuple(
        Signature((), (form,), DuplexStage(0, secs)) for form, secs in (("x", 1), ("y", 2))
    )
    writes = FormCall("a", (), (0,), signatures)
    assert hidup(FormProblem((writes,), {})).signatures == (0,)
    assert hidup(FormProblem((writes,), {}, {0: "y"})).signatures == (1,)
