"""Search: from a model, a cluster and a budget to the fastest plan that fits in memory."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import count, islice
from operator import attrgetter
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.evaluation.evaluate import lack
from superscaler_core.evaluation.found import Found
from superscaler_core.evaluation.microbatches import Resizing, graphs_of
from superscaler_core.evaluation.request import (
    EXACT,
    FULL,
    Candidate,
    Request,
    SearchPlanner,
    Trial,
)
from superscaler_core.evaluation.resized import is_same
from superscaler_core.evaluation.search_options import Progress, Search
from superscaler_core.evaluation.workers import Workers
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.planners.table import planner_of


def search(
    model_or_graph: Any,
    inputs: Sequence[Any] | Mapping[str, Any] | ModelCall | None = None,
    asked: Search | None = None,
    **options: Any,
) -> Found:
    """Search for the plan with the shortest simulated step that fits in memory.

    Every candidate is compiled, its memory is read, and its step is simulated. The chosen plan can
    therefore be run, and is never over the memory limit. Ctrl-C ends the search with the best plan
    so far.

    Args:
        model_or_graph: a model, which is captured with microbatches of several sizes; or a captured
            graph, whose microbatch size is then the only one; or a function from the number of
            samples of a microbatch to a graph.
        inputs: example arguments of the model as in ``capture``, by position or by name, or a
            ``ModelCall`` of both; dim 0 of tensors is the batch.
        asked: what is searched for, on which cluster, and for how long.
        options: attributes of ``Search`` by name, if ``asked`` is not given, or that differ from
            it.

    Raises:
        PlanError: no candidate fits, and the message says what is lacking; or a value of ``Search``
            is none of those that it can have.
    """
    how = Search.of(asked, options)
    profile = how.device_profile
    capture, sizes = graphs_of(model_or_graph, inputs, how.batch, how.samples, how.recycled)
    graphs = Resizing(capture, sizes)
    request = Request(
        graphs, sizes, how.batch, how.chosen_devices, how.levels, profile,
        profile.memory_bytes if how.memory_bytes is None else how.memory_bytes,
        optimizer=how.optimizer, precision=how.precision, recycle=how.recycle,
        captured=graphs.as_captured,
    )  # fmt: skip
    return search_request(
        request,
        planner_of(how.planner),
        budget_secs=how.budget_secs,
        max_tried=how.max_tried,
        num_processes=how.num_processes,
        progress=how.progress,
    )


def search_request(
    request: Request,
    planner: SearchPlanner,
    *,
    budget_secs: float = 60.0,
    max_tried: int = 0,
    num_processes: int = 1,
    progress: Progress | None = None,
) -> Found:
    """Search as ``search`` does, given a request."""
    if num_processes > 1 and request.clock is not time.monotonic:
        raise PlanError(
            f"num_processes={num_processes} with a clock of one process: count the budget by "
            "time.monotonic, or search with one process."
        )
    start = request.clock()
    request = replace(request, max_tried=max_tried)
    with Workers(request, num_processes) as workers:
        if request.captured is not None:
            request.captured.begin()
        evaluating = _Evaluating(request, workers, start, budget_secs, progress)
        for phase in (
            partial(evaluating.run, planner),
            evaluating.confirm,
            evaluating.go_on,
            evaluating.settle,
        ):
            try:
                phase()
            except KeyboardInterrupt:
                if not evaluating.has_any:
                    raise
                evaluating.stop()
                evaluating.confirm()
        return evaluating.found(request.clock() - start)


LAST_SHARE = 0.1
"""Last share of the budget, in which full evaluations of the best estimates precede all other
evaluations.

They begin earlier if a full evaluation takes longer than this share.
"""

EARLY_SHARE = 0.05
"""Share of the remaining budget up to which a full evaluation is cheap."""

MUCH_FASTER = 0.97
"""An estimate below this share of the best step is evaluated in full at once, if that is cheap.

Planners learn from full evaluations how wrong estimates are, mainly those of memory. For such an
estimate the search goes on beyond its budget, for ``GRACE`` of it.
"""

GRACE = 0.1
"""Share of the budget by which a search may exceed it, once a plan fits."""

TIMES_LONGER = 1.5
"""Assumed time of a full evaluation over that of a reduced one, until a pair of both was seen."""


class _Evaluating:
    """The state of one search: waiting candidates, trials, and the best plan so far.

    Candidates are evaluated in the order of their guesses. If a quick evaluation estimates a step
    below the best, the candidate is evaluated in full late in the search, or when nothing else
    waits: a full evaluation takes longer, and most estimates are beaten before. It is evaluated in
    full at once only if it is much faster and a full evaluation is cheap. A candidate whose bound
    is not below the best step is skipped, so a search that ends by itself has found the best one.

    The ``best`` trial was evaluated in full; the ``leader`` may be an estimate.
    """

    def __init__(
        self,
        request: Request,
        workers: Workers,
        start: float,
        budget_secs: float,
        progress: Progress | None,
    ) -> None:
        self._request, self._workers = request, workers
        self._end, self._last_secs = start + budget_secs, LAST_SHARE * budget_secs
        self._grace_secs = GRACE * budget_secs
        self._progress = progress
        self._times_longer, self._is_stopped = TIMES_LONGER, False
        self._waiting: list[tuple[float, int, Candidate]] = []
        self._promising: list[tuple[float, int, Candidate]] = []
        # Seconds of the quick evaluations, and the estimates of candidates that are evaluated in
        # full.
        self._small_secs: dict[Candidate, float] = {}
        self._in_full: dict[Candidate, float] = {}
        self._numbers = count()
        self._tried: list[Trial] = []
        self._num_skipped = 0
        self._given: Iterable[Candidate] = ()
        self.best: Trial | None = None
        self.leader: Trial | None = None

    def run(self, planner: SearchPlanner) -> None:
        """Evaluate candidates until none waits, or the budget is spent.

        Candidates that a planner returns as a sequence are ordered by their guesses at once. If the
        planner yields them, which may take long, they are evaluated as they come. If its answer can
        be iterated again, it is asked for more after every trial.
        """
        self._given = planner(self._request)
        if isinstance(self._given, Sequence):
            for candidate in self._given:
                self._push(candidate)
            self._given = ()
        self._go_on()

    def go_on(self) -> None:
        """While no plan fits, evaluate further candidates, beyond the budget too."""
        is_new = True
        while self.best is None and is_new and not (self._is_stopped or self._is_at_limit):
            num_before = len(self._tried)
            self._go_on()
            self.confirm()
            is_new = len(self._tried) > num_before

    @property
    def _is_at_limit(self) -> bool:
        return 0 < self._request.max_tried <= len(self._tried)

    def _go_on(self) -> None:
        while not self._is_over:
            while self._workers.has_room and not self._is_over:
                for candidate in islice(self._given, 1):
                    self._push(candidate)
                if not (self._waiting or self._promising):
                    break
                self._begin()
            ended = self._workers.wait(self._left_secs if self._has_hope else None)
            if ended is not None:
                self._take(ended)
            elif not (self._waiting or self._promising):
                return

    @property
    def _num_left(self) -> int:
        """The number of candidates that wait, here and in a planner's answer that has a length."""
        with_planner = len(self._given) if isinstance(self._given, Sized) else 0
        return len(self._waiting) + with_planner

    def found(self, search_secs: float) -> Found:
        """The result of the search.

        Raises:
            PlanError: no candidate fits.
        """
        if self.best is None:
            raise PlanError(_nothing(self._request, self._tried, self._num_left))
        tried, left = tuple(self._tried), self._num_left
        best = self.best
        return Found(self._request, best, tried, self._num_skipped, left, search_secs)

    @property
    def has_any(self) -> bool:
        """Whether any candidate fits."""
        return any(trial.fits for trial in self._tried)

    @property
    def _is_over(self) -> bool:
        is_late = self._left_secs <= 0 and self._has_hope
        return is_late or self._is_at_limit

    @property
    def _has_hope(self) -> bool:
        """Whether a plan fits, or may fit as its estimate does."""
        return self.best is not None or bool(self._promising or self._in_full)

    @property
    def _left_secs(self) -> float:
        """Seconds that are left, without those of a full evaluation of the best estimate."""
        return self._rest_secs - self._full_secs

    @property
    def _rest_secs(self) -> float:
        """Seconds of the budget that are left, minus those of the check of the best plan."""
        best = self._hope or (self.best.candidate if self.best else None)
        check_secs = self._request.check_secs(best.samples) if best else 0.0
        return self._end - check_secs - self._request.clock()

    @property
    def _hope(self) -> Candidate | None:
        """The candidate of the best estimate, if a full evaluation may show it to be the best."""
        if not self._promising or not self._is_faster(self._promising[0][0]):
            return None
        return self._promising[0][2]

    @property
    def _full_secs(self) -> float:
        """Seconds of a full evaluation of the best estimate; 0 if it cannot be the best."""
        return self._times_longer * self._small_secs[self._hope] if self._hope else 0.0

    def _push(self, candidate: Candidate) -> None:
        order = candidate.guess_secs or candidate.bound_secs
        heapq.heappush(self._waiting, (order, next(self._numbers), candidate))

    def _begin(self) -> None:
        """Give the first candidate to a worker, unless its bounds show that it cannot win."""
        if self._promising and (not self._waiting or self._is_time):
            self._begin_in_full()
            return
        _, _, candidate = heapq.heappop(self._waiting)
        if not self._is_faster(candidate.bound_secs):
            self._num_skipped += 1
        elif candidate.least_bytes > self._request.memory_bytes:
            problem = f"at least {lack(candidate.least_bytes, self._request)}"
            self._take(Trial(candidate, peak_bytes=int(candidate.least_bytes), problem=problem))
        else:
            self._workers.begin(candidate, candidate.quick)

    @property
    def _is_time(self) -> bool:
        """Whether the best estimate is to be evaluated in full now."""
        if self._left_secs <= max(self._last_secs, self._full_secs):
            return True
        # With a limit of trials, the result must not depend on the speed of the machine.
        is_cheap = self._request.max_tried > 0 or self._full_secs <= EARLY_SHARE * self._left_secs
        return is_cheap and self._is_faster(self._promising[0][0], MUCH_FASTER)

    def _begin_in_full(self) -> None:
        """Give the best estimate to a worker for a full evaluation, if it may be the best plan."""
        secs, _, candidate = heapq.heappop(self._promising)
        if self._is_faster(secs):
            self._in_full[candidate] = secs
            self._workers.begin(candidate, FULL)

    def _is_faster(self, secs: float, share: float = 1.0) -> bool:
        """Whether a step of ``secs`` seconds takes less than a share of the best so far."""
        return self.best is None or secs / share < self.best.secs

    def _take(self, trial: Trial) -> None:
        candidate = trial.candidate
        self._tried.append(trial)
        if trial.is_estimate:
            self._small_secs[candidate] = trial.evaluation_secs
        else:
            self._in_full.pop(candidate, None)
            small_secs = self._small_secs.get(candidate, 0.0)
            if small_secs:
                longer = trial.evaluation_secs / small_secs
                self._times_longer = max(self._times_longer, longer)
        if trial.fits and self._is_faster(trial.secs):
            if trial.is_estimate:
                heapq.heappush(self._promising, (trial.secs, next(self._numbers), candidate))
            else:
                self.best = trial
        if trial.fits and (self.leader is None or trial.secs < self.leader.secs):
            self.leader = trial
        for follower in candidate.follow(trial):
            self._push(follower)
        if self._progress is not None:
            self._progress(len(self._tried), self._num_left, self.leader)

    def stop(self) -> None:
        """Set the budget to 0: go on only until one plan was evaluated in full."""
        self._end, self._is_stopped = 0.0, True
        if self.best is not None:
            self._workers.forget()
            self._in_full.clear()

    def confirm(self) -> None:
        """Look at estimates in full, best first, until time is up and none is much faster.

        In another process an evaluation may begin that is perhaps too long: nothing else is left to
        do, and when time is up, it is not waited for; ``GRACE`` longer if it is much faster.
        """
        while self._rest_secs > 0 or self._is_any_owed:
            is_in_time = self._left_secs > 0 or (self._rest_secs > 0 and self._workers.are_apart)
            may_begin = bool(self._promising) and (
                is_in_time or self._is_owed(self._promising[0][0])
            )
            if may_begin and self._workers.has_room:
                self._begin_in_full()
            elif self.best is not None and not (may_begin or self._in_full):
                return
            ended = self._workers.wait(None if self.best is None else self._patience_secs)
            if ended is not None:
                self._take(ended)
            elif not (self._promising and self.best is None):
                return

    @property
    def _is_any_owed(self) -> bool:
        """Whether the search goes on beyond the budget."""
        estimates = [*self._in_full.values(), *(secs for secs, _, _ in self._promising[:1])]
        return self.best is None or any(map(self._is_owed, estimates))

    def _is_owed(self, secs: float) -> bool:
        """Whether an estimate of ``secs`` seconds is worth a full evaluation beyond the budget."""
        if self.best is None:
            return True
        is_late = self._rest_secs + self._grace_secs <= 0
        return not (is_late or self._is_stopped) and self._is_faster(secs, MUCH_FASTER)

    @property
    def _patience_secs(self) -> float:
        """Seconds for which an evaluation that is under way is waited for, once a plan fits."""
        return self._rest_secs + (self._grace_secs if self._is_any_owed else 0.0)

    def settle(self) -> None:
        """Check the best plan on the captured graph, if its own graph was made by resizing.

        If the two graphs differ, the plan is evaluated again on the captured graph. If it is then
        slower than the next best trial, that trial is checked as well.
        """
        request, exact = self._request, self._request.as_captured
        if request.captured is None:
            return
        # What other evaluations would find is not waited for, and they would slow the capture down.
        self._workers.abandon()
        settled: Trial | None = None
        fits = sorted(
            (t for t in self._tried if t.fits and not t.is_estimate), key=attrgetter("secs")
        )
        for trial in fits:
            if settled is None or trial.secs < settled.secs:
                samples, evaluation = trial.candidate.samples, trial
                if not is_same(request.graph_of(samples), exact.graph_of(samples)):
                    # In a worker that has evaluated others, if one is idle.
                    self._workers.begin(trial.candidate, EXACT)
                    ended = self._workers.wait()
                    assert ended is not None, "what was begun ends"
                    evaluation = ended
                    self._tried.append(evaluation)
                settled = min(filter(None, [settled, evaluation]), key=attrgetter("secs"))
        self._request = exact
        self.best = settled if settled is not None and settled.fits else None


def _nothing(request: Request, tried: Iterable[Trial], num_left: int) -> str:
    whys = [trial for trial in tried if trial.problem]
    least = min((t.peak_bytes for t in whys if t.lacks_memory), default=0)
    other = next((t.problem for t in whys if not t.lacks_memory), "")
    said = f"the smallest {lack(least, request)}" if least else other.rstrip(".")
    left = f" and {num_left} were left when max_tried was reached" if num_left else ""
    return (
        f"no plan was found for {len(request.devices)} devices: {len(whys)} were tried{left}; "
        f"{said or 'the planner proposes none'}. Use more devices, smaller microbatches, another "
        f"planner{' or a larger max_tried' if num_left else ''}."
    )
