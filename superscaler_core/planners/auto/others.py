"""Others: the candidates of all other planners, and auto's changes of them, which wait with auto's.

With enough time, auto looks at all candidates of another planner, and at those that follow them.
Their order is a heuristic; a candidate's ``cost`` is the number of looks to be saved up for it.

- A planner's first candidate has microbatches of about one sample per device. Its guess is the
  lower bound of a step, with recomputation where memory requires it, plus the share ``PATIENCE``
  per second that the planner is expected to think. So fast planners come first and slow ones late;
  planners that were never the best in ``bench.search`` come last.
- The next candidate is guessed to be nearly as fast as the planner's best so far; while none was
  possible, a fifth slower than the previous guess.
- A candidate that fits is followed by changes (``Change``), as settings are. It is not, if its time
  and memory equal those of an earlier trial. Changes of nearly the best plan (``NEAR``) come first.

A planner runs where its candidate is looked at: in a worker process if there are any.
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
from superscaler_core.planners.auto.traits import Traits
from superscaler_core.planners.search.request import Candidate, Request, SearchPlanner, Trial

LAZY_SECS: Mapping[str, float] = {
    "by_hand": 1, "mesh_2d": 10,
    "piper": 30, "alpa": 30, "dapple": 30, "galvatron": 40,
    "alpa_intra": 80, "unity": 80, "hidup": 10,
    "tofu": 3, "tarnawski": 30, "pipedream": 30, "pipedream_hierarchical": 30, "flexflow": 50,
}  # fmt: skip
"""Seconds that planners, or rows of ``by_hand``, think when a candidate is filled.

They are for 1000 ops and 8 devices.

They are multiplied by 10 for planners that were never faster than auto in ``bench.search``.
"""

OTHER_SECS: Mapping[str, float] = {
    "alpa_hierarchical": 8, "mesh_tf": 50, "earliest_finish": 100, "min_cut": 100,
}  # fmt: skip
"""The same seconds for planners that think before they propose."""

UNKNOWN_SECS = 20.0
"""The same seconds for a planner that is in neither table."""

LOOKS_A_SEC = 1.0
"""Usual looks per second with 8 devices, to convert thinking time into ``Candidate.cost``.

With more devices, both take longer. A deep model's looks take no longer, as they are at few blocks.
"""

PATIENCE = 0.03
"""Addition to a planner's first guess per second of thinking, as a share."""

NEEDS: Mapping[str, Callable[[Traits], bool]] = {
    "hidup": lambda traits: traits.num_experts > 0 or (traits.has_images and not traits.attentions),
    "mesh_2d": lambda traits: traits.has_features and not traits.has_images,
    "terapipe": lambda traits: traits.has_tokens,
}
"""Traits without which a planner, or a plan of ``by_hand``, is put last."""

LAST = 10.0
"""Addition to the first guess of what is put last, as a share.

Plans of ``by_hand`` that are not in ``NEEDS`` are put last too: settings come near to them.
"""

CHANGED, NEXT, SHARDED, DEARER = 1.02, 1.03, 1.05, 1.2
"""Factors that give the guess for the step of a following candidate.

``CHANGED`` is on the trial's step, after a change; ``SHARDED`` if the change is of storage, which
rarely makes steps faster. ``NEXT`` is on the planner's best step, for its next candidate.
``DEARER`` is on the last guess: after a change that only saves memory, for candidates that follow a
trial that does not fit, and for the planner's next candidate while none was possible. All are above
1, so that moves of an equally fast setting come first: these are more, and gain more. A candidate
that the planner lets follow a trial that fits is guessed to take as long as that trial.
"""

NEAR = 1.02
"""Multiple of the best step so far below which a plan's changes come before all other candidates.

Such a plan needs only a small gain to be the best, and a change costs one look.
"""

FAR = 2.0
"""Multiple of the memory beyond which a plan is followed by the most saving change only."""

_searches = count()


def _no_graph(samples: int) -> Graph:
    raise AssertionError("a planner that proposes at once asked for a graph")


class Others:
    """The candidates of other planners for one request.

    Args:
        request: the model, cluster and step.
        traits: traits of the model.
        bounds: lower bounds of the request.
        planners: the planners by name.

    Attributes:
        bound_secs, computing_secs: ``Bounds.secs`` and ``computing_secs`` of the request.
        results: step time and memory of all trials that auto has seen.
    """

    def __init__(
        self,
        request: Request,
        traits: Traits,
        bounds: Bounds,
        planners: Mapping[str, SearchPlanner],
    ) -> None:
        # sPrograms are sent to workers, which have the graphs already.
        self._request = replace(request, graph_of=_no_graph, captured=None)
        self._traits, self._planners = traits, planners
        self.bound_secs, self.computing_secs = bounds.secs, bounds.computing_secs
        self._usual_secs = (
            self.computing_secs * (AGAIN[Keep.BLOCK_INPUTS] if bounds.is_tight else 1.0) or 1.0
        )
        self.memory_bytes = request.memory_bytes
        self.search = f"{os.getpid()}.{next(_searches)}"
        self.results: set[tuple[float, int]] = set()

    def roots(self) -> Iterator[Candidate]:
        """The first candidate of every planner, and of every plan of ``by_hand``."""
        for name, planner in self._planners.items():
            if name not in LAZY_SECS:
                cost = self._cost(name)
                yield from _Row(self, name, planner, cost).next(self._guess_secs(name))
                continue
            rows: dict[str, list[Candidate]] = {}
            for each in planner(self._request):
                row = each.name.split()[0] if name == "by_hand" else name
                rows.setdefault(row, []).append(each)
            for row, candidates in rows.items():
                usual = self.usual_samples
                near = sorted(candidates, key=lambda each: distance(each.samples, usual))
                first = self._guess_secs(name, row)
                yield from _Row(self, row, near, self._cost(name, row)).next(first)

    @property
    def usual_samples(self) -> int:
        """The microbatch size of a planner's first candidate: one sample per device."""
        return len(self._request.devices)

    def asked(self, row: _Row, planner: SearchPlanner) -> Iterator[Candidate]:
        """Candidates of a planner that thinks first: its proposals by number, for every size.

        First proposals come before later ones, and sizes near the row's best before others.
        """
        numbers = dict.fromkeys(self._request.samples, 0)
        while numbers:
            samples = min(numbers, key=lambda n: (numbers[n] + row.distance(n), numbers[n]))
            how = Asked(planner, self._request, samples, numbers[samples])
            yield Candidate(f"{row.name} samples={samples} {numbers[samples] + 1}", samples, how)
            numbers[samples] += 1
            if row.is_spent:
                del numbers[samples]

    def _guess_secs(self, name: str, row: str = "") -> float:
        """The guess for a planner's first candidate, in seconds of a step."""
        secs = _secs(name, row) * self._depth * len(self._request.devices) / 8
        needs = NEEDS.get(row or name)
        is_worth = needs(self._traits) if needs else name != "by_hand"
        last = 0.0 if is_worth else LAST
        return self._usual_secs * (1 + last + PATIENCE * secs)

    def _cost(self, name: str, row: str = "") -> float:
        """The usual looks that take as long as a planner thinks."""
        return LOOKS_A_SEC * _secs(name, row) * self._depth

    @property
    def _depth(self) -> float:
        """The model's size in 1000 ops."""
        return len(self._traits.graph.ops) / 1000


def _secs(name: str, row: str = "") -> float:
    """Thinking time of a planner, or of its row, for 1000 ops and 8 devices, in seconds."""
    secs = {**LAZY_SECS, **OTHER_SECS}
    return secs.get(row, secs.get(name, UNKNOWN_SECS))


def distance(samples: int, other: int) -> float:
    """Distance of two microbatch sizes, in doublings."""
    return abs(log2(samples / other))


class _Row:
    """The sequence of one planner's candidates; the next is queued after the trial of the last.

    Attributes:
        name: name of the planner, or of a plan of ``by_hand``.
        is_spent: whether the last trial failed because the planner had no more proposals.
    """

    def __init__(
        self, others: Others, name: str, given: SearchPlanner | list[Candidate], cost: float
    ) -> None:
        self._others, self.name, self.is_spent = others, name, False
        self._cost, self._best_samples = cost, others.usual_samples
        self._left = iter(given) if isinstance(given, list) else others.asked(self, given)
        self._best_secs = inf

    def distance(self, samples: int) -> float:
        """Distance of a microbatch size from that of the best trial so far, in doublings."""
        return distance(samples, self._best_samples)

    def next(self, guess_secs: float) -> Iterator[Candidate]:
        """The next candidate, if there is one."""
        for candidate in islice(self._left, 1):
            yield self._own(candidate, guess_secs, is_next=True)

    def _own(self, given: Candidate, guess_secs: float, *, is_next: bool) -> Candidate:
        """A planner's candidate for auto's queue; if ``is_next``, the row's next one follows it."""

        def follow(trial: Trial) -> Iterator[Candidate]:
            self.is_spent = trial.problem.startswith(SPENT)
            if trial.secs < self._best_secs:
                self._best_secs, self._best_samples = trial.secs, given.samples
            if is_next:
                best = self._best_secs
                yield from self.next(best * NEXT if best < inf else guess_secs * DEARER)
            onward = trial.secs if trial.fits else guess_secs * DEARER
            for other in given.follow(trial):
                yield self._own(other, onward, is_next=False)
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
        """The planner's candidate with one more change than in the trial.

        Args:
            own: the candidate without changes.
            change: the change in the trial.
            seen: all changes of ``own`` that were proposed; extended here.
            trial: the result.
        """
        result, results = (trial.secs, trial.peak_bytes), self._others.results
        if trial.lacks_memory:
            is_far = trial.peak_bytes > FAR * self._others.memory_bytes
            dearer = trial.candidate.guess_secs * DEARER
            more = [(each, dearer) for each in change.savings(is_far)]
        elif trial.fits and result not in results:
            is_near = trial.secs <= NEAR * min((secs for secs, _ in results), default=0.0)
            near_secs = self._others.computing_secs
            cheap, dear = (near_secs if is_near else trial.secs * f for f in (CHANGED, SHARDED))
            more = [(each, cheap if each.zero == change.zero else dear) for each in change.more()]
        else:
            return
        results.add(result)
        for each, guess_secs in more:
            if each in seen:
                continue
            seen.add(each)
            yield replace(
                own,
                name=f"{own.name} {each}",
                sprogram=Changed(own.sprogram, each),
                guess_secs=guess_secs,
                cost=1.0,
                follow=partial(self._changes, own, each, seen),
            )
