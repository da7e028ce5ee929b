"""Auto: the best plan over degrees, schedules, splits, storage, recomputation and overlap.

Objective: the simulated time of a step; no device needs more than its memory.

Settings: it begins with one for every layout of the devices (data, tensor and pipeline parallel;
axial, interlaced or spatial where the model has what that needs). A setting that fits is followed
by those that differ from it in one choice, and one that lacks memory by those that need less. Which
of all these is looked at next is told by what was seen so far (``Learned``): the one that may be
fastest and seems to fit.

Others' plans: all candidates of all other planners wait as well (``others.Others``), and have a
share of the trials, so a search that ends by itself is at least as good as each of them.

What a lower bound says cannot win is not looked at. So given time it looks at all that these moves
reach, and returns the best; with less time it is a best-first search, whose order is a heuristic.
Every setting is compiled and simulated, with few microbatches and few of the repeated blocks first.

Complexity: a setting takes what compiling and simulating take.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import exp, inf, log
from typing import Protocol

import numpy as np
from scipy.stats import norm

from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.guess import Guess
from superscaler_core.planners.auto.learned import Floats, Learned, place
from superscaler_core.planners.auto.options import Options
from superscaler_core.planners.auto.others import Others
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits
from superscaler_core.planners.search.request import (
    Candidate,
    Look,
    Request,
    SearchPlanner,
    Trial,
)

ROUGH_BYTES = 2.0
"""How much rougher guesses of memory are than those of time."""

SHARE = 0.25
"""Trials of others' plans for every one of settings; others that think cost more."""

RANKED, AGAIN = 512, 32
"""Of the settings that wait, those that were ranked first are ranked anew after each trial, and all
after so many."""


class Settings(Protocol):
    """Settings that a planner may choose from, as ``Options`` has them."""

    def roots(self) -> Iterator[Setting]:
        """Those that are looked at first."""

    def moves(self, setting: Setting) -> Iterator[Setting]:
        """Changes of one that fits."""

    def savings(self, setting: Setting) -> Iterator[Setting]:
        """Changes of one that lacks memory."""


def auto(request: Request, *, others: Mapping[str, SearchPlanner] | None = None) -> Proposals:
    """Propose plans for every layout of the devices and by every other planner; follow the best.

    Args:
        request: what is asked.
        others: planners by name.
    """
    options = options_of(request)
    found = Others(request, options.traits, Bounds(request), others or {})
    return Proposals(request, options, found)


def options_of(request: Request) -> Options:
    """All that a request's model and cluster allow."""
    return Options(request, Traits(request.graph_of(request.samples[0])))


@dataclass(frozen=True)
class _Waiting:
    """A setting that may be looked at.

    Attributes:
        place: of the setting, for ``Learned``.
        secs, num_bytes: logarithms of the guesses.
        before: the trial that it is a change of, if that fits.
    """

    place: Floats
    secs: float
    num_bytes: float
    before: Trial | None


class Proposals:
    """Settings, and others' candidates, that of all that wait first that may be best.

    Iterating takes them from what waits; trials that were taken add to it.

    Args:
        request: what is asked.
        settings: to choose from.
        others: candidates of other planners; none if None.
    """

    def __init__(self, request: Request, settings: Settings, others: Others | None = None) -> None:
        self._request, self._settings = request, settings
        self._bounds, self._guess = Bounds(request), Guess(request)
        self._factors, self._byte_factors = Learned(), Learned(ROUGH_BYTES)
        self._estimate_factors, self._estimates = Learned(), dict[Setting, float]()
        self._seen: set[Setting] = set()
        self._waiting: dict[Setting, _Waiting] = {}
        self._ranks: dict[Setting, float] = {}
        self._numbers = count()
        self._others: list[tuple[float, int, Candidate]] = []
        self._results = set() if others is None else others.results
        self._credit, self._num_trials, self._best_secs = 0.0, 0, inf
        for setting in settings.roots():
            self._add(setting)
        for candidate in () if others is None else others.roots():
            self._add_other(candidate)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._others)

    def __iter__(self) -> Iterator[Candidate]:
        while len(self):
            yield self._next()

    def _next(self) -> Candidate:
        cost = self._others[0][2].cost if self._others else inf
        if cost <= self._credit or not self._waiting:
            self._credit -= cost
            return heapq.heappop(self._others)[2]
        self._credit += SHARE
        setting, guess_secs = self._first()
        before = self._waiting.pop(setting).before
        return self._candidate(setting, guess_secs, before)

    # --- settings -------------------------------------------------------------------------------

    def _add(self, setting: Setting, before: Trial | None = None) -> None:
        """A setting waits, if it is new, and if it seems not to fit, those that need less do."""
        if setting in self._seen:
            return
        self._seen.add(setting)
        where, num_bytes = place(setting), self._guess.num_bytes(setting)
        secs = log(self._guess.secs(setting))
        self._waiting[setting] = _Waiting(where, secs, log(num_bytes), before)
        need_bytes = num_bytes * exp(self._byte_factors.at([where]).mean[0])
        if need_bytes > self._request.memory_bytes:
            for changed in self._smaller(setting, need_bytes):
                self._add(changed)

    def _smaller(self, setting: Setting, peak_bytes: float) -> Iterator[Setting]:
        """Settings with fewest savings that may fit, by what this one needs."""
        waiting, seen = deque([setting]), {setting}
        while waiting:
            for changed in self._settings.savings(waiting.popleft()):
                if changed in seen:
                    continue
                seen.add(changed)
                need_bytes = self._guess.smaller_bytes(setting, peak_bytes, changed)
                if need_bytes <= self._request.memory_bytes:
                    yield changed
                else:
                    waiting.append(changed)

    def _first(self) -> tuple[Setting, float]:
        """The setting to look at next, and the time that is expected of it.

        It has the largest expected improvement of the best step so far, times the probability that
        it fits. Source: Gardner et al., "Bayesian Optimization with Inequality Constraints" (2014).
        """
        if self._num_trials % AGAIN == 0:
            self._ranks.clear()
        self._num_trials += 1
        ranks = self._ranks
        some = heapq.nlargest(RANKED, self._waiting, key=lambda each: ranks.get(each, inf))
        waiting = [self._waiting[each] for each in some]
        places = [each.place for each in waiting]
        factors, needs = self._factors.at(places), self._byte_factors.at(places)
        means = np.array([each.secs for each in waiting]) + factors.mean
        best = log(self._best_secs) if self._best_secs < inf else means.min()
        better = (best - means) / factors.deviation
        gains = factors.deviation * (norm.pdf(better) + better * norm.cdf(better))
        room = log(self._request.memory_bytes) - np.array([each.num_bytes for each in waiting])
        found = gains * norm.cdf((room - needs.mean) / needs.deviation)
        ranks.update(zip(some, found.tolist(), strict=True))
        first = int(np.argmax(found))
        return some[first], exp(means[first])

    def _candidate(self, setting: Setting, guess_secs: float, before: Trial | None) -> Candidate:
        request = self._request
        period = (setting.pp + request.recycle) * (2 if setting.duplex else 1)

        def follow(trial: Trial) -> Iterator[Candidate]:
            self._results.add(_seen_of(trial))
            self._learn(setting, trial)
            if before is not None and _seen_of(trial) == _seen_of(before):
                # The change changed nothing, so what follows it is what follows the other.
                return iter(())
            if trial.fits:
                for changed in self._settings.moves(setting):
                    self._add(changed, trial)
            elif trial.lacks_memory:
                for changed in self._smaller(setting, trial.peak_bytes):
                    self._add(changed)
            return iter(())

        num = request.microbatches(setting.microbatch)
        filling = Filling(setting, request.profile, request.recycle, num)
        return Candidate(
            str(setting),
            setting.microbatch,
            filling,
            bound_secs=self._bounds.secs(setting),
            guess_secs=guess_secs,
            least_bytes=self._bounds.least_bytes(setting),
            look=Look(period, filling.sizes),
            follow=follow,
        )

    def _learn(self, setting: Setting, trial: Trial) -> None:
        """What a trial says of the guesses, and a whole one of the estimate before it."""
        guess, where = self._guess, place(setting)
        if trial.peak_bytes > self._bounds.least_bytes(setting):
            need_bytes = float(trial.peak_bytes)
            if trial.is_estimate:
                self._estimates[setting] = need_bytes
                need_bytes *= exp(self._estimate_factors.at([where]).mean[0])
            elif setting in self._estimates:
                self._estimate_factors.see(setting, need_bytes / self._estimates[setting])
            self._byte_factors.see(setting, need_bytes / guess.num_bytes(setting))
        if trial.fits:
            self._factors.see(setting, trial.secs / guess.secs(setting))
            self._best_secs = min(self._best_secs, trial.secs)

    # --- others ---------------------------------------------------------------------------------

    def _add_other(self, candidate: Candidate) -> None:
        """Another planner's candidate waits, and after it what it is followed by."""

        def follow(trial: Trial) -> Iterator[Candidate]:
            for each in candidate.follow(trial):
                self._add_other(each)
            return iter(())

        waits = replace(candidate, follow=follow)
        heapq.heappush(self._others, (candidate.guess_secs, next(self._numbers), waits))


def _seen_of(trial: Trial) -> tuple[float, int]:
    return trial.secs, trial.peak_bytes
