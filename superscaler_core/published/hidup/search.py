"""HiDup's planner: forms of all tensors, in stages, for two halves that overlap.

Objective: with stages of communication c and computing p (seconds of a half), the recurrence

    acc' = acc + max(debt, c) + max(p, c),    debt' = p,    a step takes acc + debt

plus a backward of ``BACKWARDS`` for every stage. A dynamic programme goes through the calls in
their order. A position between two calls is a cut. A state is a cut, the forms of every live tensor
(at most two, because a tensor communicates at most once), and what is known of the open stage. For
each state, all partial strategies are kept whose costs no other dominates. Comparing ``acc + debt``
alone would be wrong: a larger debt hides more of the next communication.

A stage has communications, only of tensors that live when it begins, and then calls. Only the first
stage, or one after a full stage, may have no communication.

Without ``beam`` the search is exact. It then looks only for strategies that take less than the best
one of a first search with a beam. Complexity: O(N S^2 F W) for N calls, S signatures of a call, F
strategies of a state that do not dominate each other, and W states of a cut, which grow
exponentially with the number of live tensors.

Differences from the published code: dominance is used inside stages too, so a stage need not be
short; with ``most_calls=11`` the limit is that of the published code, which tests ``len > 10``
after it has inserted. A communication is in the stage of the first call that needs it. The
communication of weights is part of a signature.

Source: Zhang et al., Accelerating Large-Scale Distributed Neural Network Training with SPMD
Parallelism, SoCC 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from operator import itemgetter, le
from typing import NamedTuple

from superscaler_core.errors import PlanError
from superscaler_core.published.hidup.problem import (
    Form,
    FormCall,
    FormProblem,
    FormStage,
    FormStrategy,
    Signature,
)
from superscaler_core.published.hidup.recurrence import Duplexed, DuplexStage

PUBLISHED_MOST_CALLS = 11
"""The most calls of a stage in the published code."""

FIRST_BEAM = 64
"""The beam of the first search, whose result bounds the exact search."""

Costs = tuple[float, ...]
"""All costs of a partial strategy: of its closed stages, then of its open one."""


def all_costs(closed: Duplexed, stage: DuplexStage) -> Costs:
    """The costs that dominance compares: those of closed stages, then the open stage's work."""
    return *closed, *stage


def hidup(
    problem: FormProblem,
    *,
    backward: str = "woven",
    counts_last: bool = True,
    most_calls: int | None = PUBLISHED_MOST_CALLS,
    beam: int | None = None,
    compared: Callable[[Duplexed, DuplexStage], Costs] = all_costs,
) -> FormStrategy:
    """The strategy of the least time of a step of two halves.

    Args:
        problem: the calls and their forms.
        backward: one of ``BACKWARDS``.
        counts_last: as in ``Duplexed.secs``.
        most_calls: the most calls of a stage; any number if None.
        beam: how many strategies are kept per cut, those with the least lower bounds; all if None.
        compared: the costs by which dominance is decided: a strategy is kept only if, against every
            other one of its state, at least one of them is less.

    Raises:
        PlanError: no signatures fit each other.
    """
    search = _Search(problem, backward, counts_last, most_calls, compared)
    found, is_exact = search.run(beam or FIRST_BEAM, inf)
    if beam is None and not is_exact:
        # The limit is a little above that time, so that rounding does not drop its own strategy.
        found, _ = search.run(None, inf if found is None else found.secs * (1 + 1e-9))
    if found is None:
        raise PlanError(
            f"HiDup: the signatures of {len(problem.calls)} calls do not fit each other; give "
            "every call one that reads and writes whole tensors."
        )
    return found


class _Live(NamedTuple):
    """A tensor that a later call needs: its forms, and whether the open stage wrote it."""

    tensor: int
    form: Form
    second: Form | None
    is_new: bool


class _State(NamedTuple):
    """All that later calls depend on.

    Attributes:
        live: the live tensors, in the order in which they were written.
        may_end: whether the open stage has communication, or needs none.
        num_calls: calls of the open stage; always 0 if there is no limit.
    """

    live: tuple[_Live, ...]
    may_end: bool
    num_calls: int


class _Partial(NamedTuple):
    """A strategy for the first calls: its last step, and the strategy before that step."""

    closed: Duplexed
    stage: DuplexStage
    before: _Partial | None
    signature: int
    reforms: tuple[tuple[int, Form, Form], ...]
    opens: bool


_Fronts = dict[_State, list[tuple[Costs, _Partial]]]


@dataclass(frozen=True, eq=False)
class _Search:
    problem: FormProblem
    backward: str
    counts_last: bool
    most_calls: int | None
    compared: Callable[[Duplexed, DuplexStage], Costs]

    def run(self, beam: int | None, most_secs: float) -> tuple[FormStrategy | None, bool]:
        """The best strategy of at most ``most_secs``, and whether the beam dropped no strategy."""
        is_exact = True
        rest = self._least_rests()
        start = _Partial(Duplexed(), DuplexStage(), None, -1, (), True)
        fronts: _Fronts = {_State((), True, 0): [((), start)]}
        for number, call in enumerate(self.problem.calls):
            after: _Fronts = {}
            for state, front in fronts.items():
                for next_state, step in self._steps(number, call, state):
                    kept = after.setdefault(next_state, [])
                    for _, partial in front:
                        made = step(partial)
                        if most_secs == inf or self._bound(made, rest[number + 1]) <= most_secs:
                            self._insert(kept, made)
            fronts = self._best(after, rest[number + 1], beam)
            is_exact = is_exact and fronts is after
        ends = [
            (self._secs(partial), partial)
            for state, front in fronts.items()
            if state.may_end and self._has_results(state)
            for _, partial in front
        ]
        if not ends:
            return None, is_exact
        secs, last = min(ends, key=lambda end: end[0])
        return FormStrategy(_stages(last), secs), is_exact

    # --- steps ----------------------------------------------------------------------------------

    def _steps(
        self, number: int, call: FormCall, state: _State
    ) -> Iterator[tuple[_State, Callable[[_Partial], _Partial]]]:
        """Every way to run a call next: in the open stage, or as the first one of a new stage."""
        is_full = self.most_calls is not None and state.num_calls >= self.most_calls
        for which, signature in enumerate(call.signatures):
            for opens in (False, True):
                if (not state.may_end or number == 0) if opens else is_full:
                    continue
                live = state.live
                if opens:
                    live = tuple(each._replace(is_new=False) for each in live)
                found = self._reformed(call, signature, live)
                if found is None:
                    continue
                live, reforms, comm = found
                work = signature.work.plus(comm)
                talks = bool(reforms or work.comm_secs or work.backward_comm_secs)
                num_calls = 0 if self.most_calls is None else 1 + (not opens) * state.num_calls
                may_end = talks or (is_full if opens else state.may_end)
                live = self._after(number, call, signature, live)
                step = self._step(work, which, reforms, opens)
                yield _State(live, may_end, num_calls), step

    def _step(
        self,
        work: DuplexStage,
        which: int,
        reforms: tuple[tuple[int, Form, Form], ...],
        opens: bool,
    ) -> Callable[[_Partial], _Partial]:
        def step(before: _Partial) -> _Partial:
            if not opens:
                stage = before.stage.plus(work)
                return _Partial(before.closed, stage, before, which, reforms, False)
            closed = before.closed.then(before.stage, self.backward)
            return _Partial(closed, work, before, which, reforms, True)

        return step

    def _reformed(
        self, call: FormCall, signature: Signature, live: tuple[_Live, ...]
    ) -> tuple[tuple[_Live, ...], tuple[tuple[int, Form, Form], ...], DuplexStage] | None:
        """The communications that a signature still needs, or None if they are impossible."""
        reforms: list[tuple[int, Form, Form]] = []
        comm = DuplexStage()
        needed = dict.fromkeys(zip(call.reads, signature.reads, strict=True))
        for tensor, form in needed:
            place = next(i for i, each in enumerate(live) if each.tensor == tensor)
            has = live[place]
            if form in (has.form, has.second):
                continue
            cost = self.problem.reforms.get(tensor, {}).get((has.form, form))
            if cost is None or has.second is not None or has.is_new:
                return None
            reforms.append((tensor, has.form, form))
            comm = comm.plus(cost)
            live = (*live[:place], has._replace(second=form), *live[place + 1 :])
        return live, tuple(reforms), comm

    def _after(
        self, number: int, call: FormCall, signature: Signature, live: tuple[_Live, ...]
    ) -> tuple[_Live, ...]:
        last_use = self.problem.last_use
        written = (
            _Live(t, form, None, True)
            for t, form in zip(call.writes, signature.writes, strict=True)
        )
        return tuple(each for each in (*live, *written) if last_use[each.tensor] > number)

    def _has_results(self, state: _State) -> bool:
        forms = {each.tensor: (each.form, each.second) for each in state.live}
        return all(form in forms[t] for t, form in self.problem.results.items())

    # --- costs ----------------------------------------------------------------------------------

    def _secs(self, partial: _Partial) -> float:
        closed = partial.closed.then(partial.stage, self.backward)
        return closed.secs(counts_last=self.counts_last)

    def _least_rests(self) -> list[tuple[float, float]]:
        """For every cut, the least computing of the calls behind it, forward and backward."""
        # If the last stage's backward does not count, the bound counts no backward at all.
        has_backward = self.backward != "none" and self.counts_last
        rest = [(0.0, 0.0)]
        for call in reversed(self.problem.calls):
            forward = min(s.work.secs for s in call.signatures)
            backward = min(s.work.backward_secs for s in call.signatures) if has_backward else 0.0
            rest.append((rest[-1][0] + forward, rest[-1][1] + backward))
        return rest[::-1]

    def _bound(self, partial: _Partial, rest: tuple[float, float]) -> float:
        """A lower bound on the seconds of all strategies with these first calls.

        Both halves still have to compute the rest. At best, one of them does so beside the
        communication of the open stage.
        """
        comm, secs, backward_comm, backward_secs = partial.stage
        return (
            self._secs(partial)
            + _least_more(comm, secs, rest[0])
            + _least_more(backward_comm, backward_secs, rest[1])
        )

    def _insert(self, front: list[tuple[Costs, _Partial]], made: _Partial) -> None:
        """Add a strategy to its state unless another dominates it; drop all that it dominates."""
        costs = self.compared(made.closed, made.stage)
        if any(all(map(le, has, costs)) for has, _ in front):
            return
        front[:] = [kept for kept in front if not all(map(le, costs, kept[0]))]
        front.append((costs, made))

    def _best(self, fronts: _Fronts, rest: tuple[float, float], beam: int | None) -> _Fronts:
        """The ``beam`` strategies with the least bounds, over all states."""
        if beam is None or sum(map(len, fronts.values())) <= beam:
            return fronts
        bounds = [
            (self._bound(kept[1], rest), state, kept)
            for state, front in fronts.items()
            for kept in front
        ]
        found: _Fronts = {}
        for _, state, kept in sorted(bounds, key=itemgetter(0))[:beam]:
            found.setdefault(state, []).append(kept)
        return found


def _least_more(comm: float, secs: float, rest: float) -> float:
    return max(2 * (secs + rest), comm + secs + rest) - max(2 * secs, comm + secs)


def _stages(last: _Partial) -> tuple[FormStage, ...]:
    """The stages of a strategy, from its steps."""
    steps: list[_Partial] = []
    step: _Partial | None = last
    while step is not None and step.before is not None:
        steps.append(step)
        step = step.before
    found: list[FormStage] = []
    for each in reversed(steps):
        if each.opens or not found:
            found.append(FormStage((), (), each.stage))
        stage = found[-1]
        found[-1] = FormStage(
            stage.reforms + each.reforms, (*stage.signatures, each.signature), each.stage
        )
    return tuple(found)
