"""``SameCall``: all ranks make one call with equal arguments, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from superscaler_core.errors import CaptureError, PlanError
from superscaler_core.run import Transport
from superscaler_core.training.load import in_threads
from superscaler_core.training.same_call import CallRequest, SameCall

RANKS = (0, 1, 2)


def on_ranks(work: Callable[[SameCall, int], object]) -> list[object]:
    """What ``work`` returns or raises on each rank."""

    def serve(transport: Transport) -> object:
        try:
            return work(SameCall(RANKS, transport), transport.rank)
        except Exception as error:
            return type(error), str(error)

    found = in_threads(serve, range(len(RANKS)), timeout_secs=10)
    return [found[rank] for rank in RANKS]


def test_equal_calls_pass() -> None:
    def work(calls: SameCall, _: int) -> str:
        for _ in range(3):
            with calls.prepared("step", batch="[8, 6]") as request:
                request.equal["program"] = "3"
        return "done"

    assert on_ranks(work) == ["done"] * 3


def test_ranks_in_different_calls_are_told_both_calls() -> None:
    def work(calls: SameCall, rank: int) -> None:
        with calls.prepared("clip_grad_norm_" if rank == 1 else "step"):
            pass

    text = (
        "rank 0 calls step and rank 1 calls clip_grad_norm_: all ranks have to make the same calls "
        "in the same order."
    )
    assert on_ranks(work) == [(PlanError, text)] * 3


def test_the_first_differing_line_of_what_must_be_equal_is_told() -> None:
    def work(calls: SameCall, rank: int) -> None:
        with calls.prepared("step", model=f"op 1\nop 2 p={0.1 * (rank == 2)}\nop 3"):
            pass

    text = (
        "step: ranks disagree about model: rank 0 has op 2 p=0.0, rank 2 has op 2 p=0.1; it has to "
        "be the same on all ranks."
    )
    assert on_ranks(work) == [(PlanError, text)] * 3


@pytest.mark.parametrize("kind", [CaptureError, ValueError, RuntimeError, OSError])
def test_fault_of_one_rank_is_raised_on_all_in_its_class(kind: type[Exception]) -> None:
    def work(calls: SameCall, rank: int) -> None:
        with calls.prepared("step"):
            if rank == 1:
                raise kind("why")

    others = (kind, "step failed on rank 1: why")
    assert on_ranks(work) == [others, (kind, "why"), others]


def test_fault_whose_class_is_unknown_elsewhere_is_a_runtime_error_there() -> None:
    class OfUserError(Exception):
        pass

    def work(calls: SameCall, rank: int) -> None:
        with calls.prepared("step"):
            if rank == 2:
                raise OfUserError("why")

    others = (RuntimeError, "step failed on rank 2: why")
    assert on_ranks(work) == [others, others, (OfUserError, "why")]


def test_ranks_can_go_on_after_a_call_that_all_refused() -> None:
    def work(calls: SameCall, rank: int) -> str:
        with pytest.raises(PlanError), calls.prepared("step", batch=str(rank)):
            pass
        with calls.prepared("step", batch="same"):
            pass
        return "done"

    assert on_ranks(work) == ["done"] * 3


def test_all_ranks_learn_that_one_asks() -> None:
    def work(calls: SameCall, rank: int) -> tuple[int, bool]:
        with calls.prepared("step") as request:
            request.asks, request.form = (0, 2, 1)[rank], rank // 2
        return request.asks, request.is_one_form

    assert on_ranks(work) == [(3, False)] * 3


@pytest.mark.parametrize("groups", [[(1, 5), (1, 5), (2, 7)], [(1, 5), (2, 6), (3, 7)]])
def test_digests_are_compared_within_their_group_alone(groups: list[tuple[int, int]]) -> None:
    def work(calls: SameCall, rank: int) -> str:
        calls.digests = lambda: groups[rank]
        with calls.prepared("step"):
            pass
        return "done"

    assert on_ranks(work) == ["done"] * 3


def test_other_digest_in_a_group_is_refused_on_all_ranks() -> None:
    def work(calls: SameCall, rank: int) -> None:
        calls.digests = lambda: (1, rank // 2)
        with calls.prepared("step"):
            pass

    found = on_ranks(work)
    assert {kind for kind, _ in found} == {PlanError}  # type: ignore[misc]
    assert all("ranks 0 and 2 stepped optimizers" in text for _, text in found)  # type: ignore[misc]


def test_one_rank_alone_raises_its_own_fault() -> None:
    alone = SameCall((0,), None)  # type: ignore[arg-type]
    with alone.prepared("step") as request:
        pass
    assert request == CallRequest({"call": "step"})
    with pytest.raises(KeyError), alone.prepared("step"):
        raise KeyError("why")
