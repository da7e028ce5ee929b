"""Others: the candidates of all other planners, which wait with auto's, and auto's changes of them.

Given time auto has looked at whatever another planner proposes, and at what that is followed by. In
which order is a heuristic; a candidate's ``cost`` says how much is to be saved up for it.

- Its first candidate has microbatches of about one sample a device. It is guessed to take the lower
  bound of a step, with recomputation where memory is too small for less, and ``PATIENCE`` longer
  for each second that the planner is expected to think: cheap planners come first, slow ones
  late, and what was the best of no cell yet after nearly all else.
- The next one is guessed to be nearly as fast as its planner's best so far; after each that cannot
  be, a fifth slower than the last guess.
- One that fits is followed by changes (``Change``), as settings are; what a planner finds that was
  found before, by its time and memory, is not.

Planners think where a candidate is looked at, in a worker if there are any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, islice
from math import inf, log2

from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.asked import SPENT, Asked, Remembered
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.change import NO_CHANGE, Change, Changed
from superscaler_core.planners.auto.guess import AGAIN
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits
from superscaler_core.planners.search.request import Candidate, Request, SearchPlanner, Trial

LAZY_SECS: Mapping[str, float] = {
    "by_hand": 1,
    "piper": 3, "alpa": 3, "dapple": 3, "galvatron": 4,
    "alpa_intra": 8, "unity": 8, "hidup": 10,
    "tofu": 3, "tarnawski": 30, "pipedream": 30, "pipedream_hierarchical": 30, "flexflow": 50,
}  # fmt: skip
"""Planners that propose at once and think where a candidate is filled, with the seconds that this
takes them for a thousand ops and eight devices; tenfold for those that were the best other planner
in no cell of ``bench.search``."""

OTHER_SECS: Mapping[str, float] = {
    "alpa_hierarchical": 8, "mesh_tf": 50, "earliest_finish": 100, "min_cut": 100,
}  # fmt: skip
"""The same of planners that think before they propose."""

UNKNOWN_SECS = 20.0
"""Of a planner that is in no table."""

LOOKS_A_SEC = 3.0
"""Looks at settings in a second, where that is what planners take."""

PATIENCE = 0.03
"""What a second of thinking adds to a guess, as a share of the bound."""

NEEDS: Mapping[str, Callable[[Traits], bool]] = {
    "hidup": lambda traits: traits.num_experts > 0,
    "mesh_2d": lambda traits: traits.has_features,
    "terapipe": lambda traits: traits.has_tokens,
}
"""What a model needs for a planner, or a plan by hand, to be worth its time."""

LAST = 10.0
"""The guess for what is worth no time, in bounds. So are plans by hand that are not in ``NEEDS``:
settings come near to them."""

CHANGED, NEXT, DEARER = 1.02, 1.05, 1.2
"""Guesses of what a step takes, as shares: after a change; for a planner's next candidate, of its
best so far; and after a change that only saves memory, for what a planner says to look at instead,
or where it has found nothing yet.
Above 1, so that moves of a setting that is as fast come first: there are more, and they gain
more."""

FAR = 2.0
"""How often too much memory has to be needed that only the most saving change is tried."""

_searches = count()


def _no_graph(samples: int) -> Graph:
    raise AssertionError("a planner that proposes at once asked for a graph")


class Others:
    """The candidates of other planners for one request.

    Args:
        request: what is asked.
        traits: of its model.
        bounds: of the request.
        planners: by name.

    Attributes:
        results: times and memory of all that auto has seen.
    """

    def __init__(
        self,
        request: Request,
        traits: Traits,
        bounds: Bounds,
        planners: Mapping[str, SearchPlanner],
    ) -> None:
        # What is sent to workers has no graphs; they have them.
        self._request = replace(request, graph_of=_no_graph, captured=None)
        self._traits, self._planners = traits, planners
        self.bound_secs = bounds.secs(Setting())
        self._usual_secs = (
            self.bound_secs * (AGAIN[Keep.BLOCK_INPUTS] if bounds.is_tight else 1.0) or 1.0
        )
        self.memory_bytes = request.memory_bytes
        self.search = f"{os.getpid()}.{next(_searches)}"
        self.results: set[tuple[float, int]] = set()

    def roots(self) -> Iterator[Candidate]:
        """The first candidate of every planner, and of every plan by hand."""
        for name, planner in self._planners.items():
            if name not in LAZY_SECS:
                yield from _Row(self, name, planner, _secs(name)).next(self._guess_secs(name))
                continue
            rows: dict[str, list[Candidate]] = {}
            for each in planner(self._request):
                row = each.name.split()[0] if name == "by_hand" else name
                rows.setdefault(row, []).append(each)
            for row, candidates in rows.items():
                near = sorted(candidates, key=lambda each: self.distance(each.samples))
                first = self._guess_secs(name, row)
                yield from _Row(self, row, near, _secs(name)).next(first)

    def distance(self, samples: int) -> float:
        """From microbatches of one sample a device."""
        return abs(log2(samples / len(self._request.devices)))

    def asked(self, row: _Row, planner: SearchPlanner) -> Iterator[Candidate]:
        """What a planner proposes that thinks before: a number after the other, of every size."""
        for samples in sorted(self._request.samples, key=self.distance):
            row.is_spent = False
            for number in count():
                how = Asked(planner, self._request, samples, number)
                yield Candidate(f"{row.name} samples={samples} {number + 1}", samples, how)
                if row.is_spent:
                    break

    def _guess_secs(self, name: str, row: str = "") -> float:
        """Of a planner's first candidate."""
        size = len(self._traits.graph.ops) / 1000 * len(self._request.devices) / 8
        secs = _secs(name) * size
        needs = NEEDS.get(row or name)
        is_worth = needs(self._traits) if needs else name != "by_hand"
        last = 0.0 if is_worth else LAST
        return self._usual_secs * (1 + last + PATIENCE * secs)


def _secs(name: str) -> float:
    """What a planner thinks, for a thousand ops and eight devices."""
    return {**LAZY_SECS, **OTHER_SECS}.get(name, UNKNOWN_SECS)


class _Row:
    """The candidates of one planner, of which the next one follows what came of the last.

    Attributes:
        name: of the planner, or of a plan by hand.
        is_spent: whether a planner that was asked for a number had no such proposal.
    """

    def __init__(
        self, others: Others, name: str, given: SearchPlanner | list[Candidate], secs: float
    ) -> None:
        self._others, self.name, self.is_spent = others, name, False
        self._cost = LOOKS_A_SEC * secs
        self._left = iter(given) if isinstance(given, list) else others.asked(self, given)
        self._best_secs = inf

    def next(self, guess_secs: float) -> Iterator[Candidate]:
        """The next candidate, if there is one."""
        for candidate in islice(self._left, 1):
            yield self._own(candidate, guess_secs, is_next=True)

    def _own(self, given: Candidate, guess_secs: float, *, is_next: bool) -> Candidate:
        """The planner's candidate in the queue; ``is_next`` if the row goes on behind it."""

        def follow(trial: Trial) -> Iterator[Candidate]:
            self.is_spent = trial.problem.startswith(SPENT)
            self._best_secs = min(self._best_secs, trial.secs)
            if is_next:
                best = self._best_secs
                yield from self.next(best * NEXT if best < inf else guess_secs * DEARER)
            for other in given.follow(trial):
                yield self._own(other, guess_secs * DEARER, is_next=False)
            yield from self._changes(own, NO_CHANGE, {NO_CHANGE}, trial)

        name = given.name if self.name in given.name else f"{self.name} {given.name}"
        how = Remembered(self._others.search, name, given.sprogram)
        own = Candidate(
            name, given.samples, how, self._others.bound_secs, guess_secs, given.least_bytes,
            cost=self._cost, follow=follow,
        )  # fmt: skip
        return own

    def _changes(
        self, own: Candidate, change: Change, seen: set[Change], trial: Trial
    ) -> Iterator[Candidate]:
        """The planner's candidate with one change more than the one of the trial.

        Args:
            own: without a change.
            change: of the trial.
            seen: all changes of it that were proposed.
            trial: what came of it.
        """
        result, results = (trial.secs, trial.peak_bytes), self._others.results
        if trial.lacks_memory:
            is_far = trial.peak_bytes > FAR * self._others.memory_bytes
            more, secs = change.savings(is_far), trial.candidate.guess_secs * DEARER
        elif trial.fits and result not in results:
            more, secs = change.more(), trial.secs * CHANGED
        else:
            return
        results.add(result)
        for each in more:
            if each in seen:
                continue
            seen.add(each)
            yield replace(
                own,
                name=f"{own.name} {each}",
                sprogram=Changed(own.sprogram, each),
                guess_secs=secs,
                cost=1.0,
                follow=partial(self._changes, own, each, seen),
            )
