"""``UserCalls``: an error of communication says which call of the user every rank is in."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torch import Tensor

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.run import Trail
from superscaler_core.training.user_calls import MAX_CALLS, MAX_RANKS, UserCalls
from tests.superscaler_core.parallel.threads import on_threads
from tests.superscaler_core.run.test_results import batch, words

BATCH = r"with tokens \[4, 6\] int64, labels \[4, 6\] int64"
LAST = rf"Rank 1 is in no call: its last, step 1 {BATCH}, ended \d\.\d s ago\."


def named(size: int) -> dict[str, Tensor]:
    tokens, labels = batch(size, 0)
    return {"tokens": tokens, "labels": labels}


def lines_of(work: Callable[[ss.Parallel, Callable[[], Any]], object]) -> list[str]:
    """The error of rank 0, if both ranks do this after one common step.

    ``work`` gets the model and a function that waits until rank 0 has its error.
    """
    errors: dict[int, str] = {}
    is_over = threading.Event()

    def guarded(parallel: ss.Parallel) -> None:
        parallel.step(**named(4))
        try:
            work(parallel, lambda: is_over.wait(20))
        except TimeoutError as error:
            errors[parallel.trainer.rank] = str(error)
        finally:
            if parallel.trainer.rank == 0:
                is_over.set()

    plan = "one_f_one_b:microbatches=2"
    # A step that failed is raised again when the threads end.
    with suppress(TimeoutError):
        on_threads(words(), named(4), 2, guarded, plan=plan, timeout_secs=0.5)
    return errors[0].splitlines()


def fits(lines: list[str], *patterns: str) -> bool:
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_rank_that_never_calls_is_named_with_its_last_call(call: str) -> None:
    def work(parallel: ss.Parallel, wait: Callable[[], Any]) -> None:
        if parallel.trainer.rank == 0:
            getattr(parallel, call)(**named(4))
        wait()

    number = {"step": 2, "evaluate": 1}[call]
    lines = lines_of(work)
    assert fits(
        lines,
        r"rank 0 waits to agree with ranks \(0, 1\): 1 of 2 came .*",
        rf"Rank 0 is in {call} {number} {BATCH}, outside of its program\.",
        LAST,
    ), lines


def test_an_error_inside_the_program_says_in_which_instruction() -> None:
    def work(parallel: ss.Parallel, wait: Callable[[], Any]) -> None:
        if parallel.trainer.rank == 1:

            def hang(*_: Any) -> None:
                wait()
                raise TimeoutError("ends")

            parallel._first._tape.backward = hang  # type: ignore[assignment]
        parallel.step(**named(4))

    lines = lines_of(work)
    assert fits(
        lines,
        r"rank 0 waits for .*: 1 of 2 ranks came .*",
        rf"Rank 0 is in step 2 {BATCH}, at instruction \d+: receive grad e\d+ mb 0\.",
        rf"Rank 1 is in step 2 {BATCH}, which still runs there\.",
    ), lines


def test_ranks_that_fail_with_another_one_say_where_they_were() -> None:
    def work(parallel: ss.Parallel, wait: Callable[[], Any]) -> None:
        if parallel.trainer.rank == 1:

            def fail(*_: Any) -> None:
                raise TimeoutError("a link is down")

            parallel._first._tape.backward = fail  # type: ignore[assignment]
        parallel.step(**named(4))

    lines = lines_of(work)
    assert fits(
        lines,
        r"rank 0 waits for .*: 1 of 2 ranks came \(a link is down\)\.",
        rf"Rank 0 is in step 2 {BATCH}, at instruction \d+: receive grad e\d+ mb 0\.",
        rf"Rank 1 is in step 2 {BATCH}, at instruction \d+: backward stage1_segment\d mb 0\.",
    ), lines


class Noted:
    """A transport that only carries notes."""

    global_ranks = tuple(range(MAX_RANKS + 3))

    def __init__(self, told: dict[int, str]) -> None:
        self._told = told

    def tell(self, text: str) -> None:
        self._told[0] = text

    def told(self) -> dict[int, str]:
        return self._told


def calls(num_ranks: int = 2) -> UserCalls:
    return UserCalls(range(num_ranks), Noted({}))  # type: ignore[arg-type]


def test_a_call_inside_of_another_one_is_part_of_it() -> None:
    users = calls()
    with users.inside("step"), users.inside("clip_grad_norm_"):
        pass
    with users.inside("step"):
        pass
    assert [(call.name, call.number, call.seq) for call in users.calls] == [
        ("step", 1, 1), ("step", 2, 2),
    ]  # fmt: skip


def test_an_error_of_the_user_is_left_as_it_is() -> None:
    users = calls()
    with pytest.raises(ValueError, match=r"^why$"), users.inside("step"):
        raise ValueError("why")
    assert users.calls[-1].failed


def test_the_position_is_that_of_the_failed_call() -> None:
    users, trail = calls(1), Trail()
    users.trail = lambda: trail
    trail.note("total loss", ())
    with pytest.raises(TimeoutError), users.inside("step"):
        raise TimeoutError("before the program")

    def run() -> None:
        with users.inside("step"):
            trail.note("begin", ())
            raise TimeoutError("in the program")

    with pytest.raises(TimeoutError):
        run()
    assert [call.position for call in users.calls] == ["", "instruction 2: begin"]


def test_ranks_in_one_place_share_a_line() -> None:
    users = calls(MAX_RANKS + 3)
    with pytest.raises(TimeoutError) as error, users.inside("save"):
        raise TimeoutError("late")
    assert str(error.value).splitlines() == [
        "late",
        "Rank 0 is in save 1, outside of its program.",
        "Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more are in no call: it has made none.",
    ]


def test_a_rank_remembers_its_last_calls() -> None:
    users = calls(1)
    for _ in range(MAX_CALLS + 2):
        with users.inside("step"):
            pass
    assert (users.calls[0].seq, users.calls[-1].seq) == (3, MAX_CALLS + 2)


def test_a_lost_group_does_not_hide_the_error() -> None:
    class Lost(Noted):
        def tell(self, text: str) -> None:
            raise rv.CommError("no group")

        def told(self) -> dict[int, str]:
            raise rv.CommError("no group")

    users = UserCalls(range(2), Lost({}))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"^late\n"), users.inside("step"):
        raise TimeoutError("late")
