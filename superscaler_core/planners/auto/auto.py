"""Auto: the best plan over degrees, schedules, splits, storage, recomputation and overlap.

Objective: the simulated time of a step; no device may need more than its memory.

Settings: the search begins with settings for every layout of the devices (data, tensor and pipeline
parallel; axial, interlaced or spatial where the model allows it). A setting that fits is followed
by the settings that differ in one choice. A setting that lacks memory is followed by settings that
need less. ``Ranking`` selects the next one from the trials so far.

Other planners: all their candidates wait as well (``others.Others``) and get a share of the trials,
so a search that ends by itself is at least as good as each of them.

A candidate that cannot win by its lower bound is not looked at. With enough time, the search looks
at all other settings that these moves reach, and returns the best. With less time it is a
best-first search, whose order is a heuristic. Every setting is compiled and simulated, at first
with few microbatches and few of the repeated blocks.

Complexity: one compilation and simulation per setting.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import inf
from typing import Protocol

from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.guess import Guess
from superscaler_core.planners.auto.options import Options
from superscaler_core.planners.auto.others import Others
from superscaler_core.planners.auto.ranking import Ranking
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import traits_of
from superscaler_core.planners.search.request import (
    Candidate,
    Look,
    Request,
    SearchPlanner,
    Trial,
)

ROUNDS = 4
"""Periods of microbatches in the first look at a pipeline; two more per further chunk of a worker.

With 3, first looks at pipelines of uneven stages were up to 5 % too fast (Wide-ResNet, mBART).
"""

SHARE, LEADING = 0.25, 1.0
"""Usual looks at other planners' candidates per look at a setting; slow planners cost more.

``LEADING`` holds while the fastest plan so far is another planner's.
"""


class Settings(Protocol):
    """A space of settings, such as ``Options``."""

    def roots(self) -> Iterator[Setting]:
        """The settings with which the search begins."""

    def moves(self, setting: Setting) -> Iterator[Setting]:
        """The changes of a setting that fits."""

    def savings(self, setting: Setting) -> Iterator[Setting]:
        """The changes of a setting that lacks memory."""


def auto(request: Request, *, others: Mapping[str, SearchPlanner] | None = None) -> Proposals:
    """Propose settings for every layout of the devices, and the candidates of other planners.

    Args:
        request: the model, cluster and step.
        others: other planners by name.
    """
    options = options_of(request)
    found = Others(request, options.traits, Bounds(request), others or {})
    return Proposals(request, options, found)


def options_of(request: Request) -> Options:
    """The settings that a request's model and cluster allow."""
    return Options(request, traits_of(request.graph_of(request.samples[0])))


class Proposals:
    """The queue of waiting settings and of other planners' candidates, most promising first.

    Iterating takes candidates from the queue; following a trial (``Candidate.follow``) adds to it.

    Args:
        request: the model, cluster and step.
        settings: the space of settings.
        others: candidates of other planners; none if None.
    """

    def __init__(self, request: Request, settings: Settings, others: Others | None = None) -> None:
        self._request, self._settings = request, settings
        self._bounds, self._guess = Bounds(request), Guess(request)
        self._ranking = Ranking(self._guess, request.memory_bytes)
        # Every setting that was added, with the trial of the setting that it changes, if that fits.
        self._before: dict[Setting, Trial | None] = {}
        # Settings that seem to need too much memory; they wait until nothing else does.
        self._unlikely: dict[Setting, None] = {}
        self._numbers = count()
        self._others: list[tuple[float, int, Candidate]] = []
        self._results = set() if others is None else others.results
        self._credit, self._share = 0.0, SHARE
        for setting in settings.roots():
            self._add(setting)
        self._ranking.begin_with_layouts()
        for candidate in () if others is None else others.roots():
            self._add_other(candidate)

    def __len__(self) -> int:
        return len(self._ranking) + len(self._others) + len(self._unlikely)

    def __iter__(self) -> Iterator[Candidate]:
        while len(self):
            yield self._next()

    def _next(self) -> Candidate:
        if not (len(self._ranking) or self._others):
            for setting in [*self._unlikely]:
                self._add(setting)
        cost = self._others[0][2].cost if self._others else inf
        if cost <= self._credit or not len(self._ranking):
            self._credit -= cost
            return heapq.heappop(self._others)[2]
        self._credit += self._share
        return self._candidate(*self._ranking.take())

    # --- settings -------------------------------------------------------------------------------

    def _add(self, setting: Setting, before: Trial | None = None) -> None:
        """Queue a new setting, and if it seems not to fit, settings that need less memory."""
        if setting in self._before:
            return
        self._before[setting] = before
        self._unlikely.pop(setting, None)
        need_bytes = self._ranking.add(setting)
        if need_bytes > self._request.memory_bytes:
            for changed in self._smaller(setting, need_bytes):
                self._add(changed)

    def _smaller(self, setting: Setting, peak_bytes: float) -> Iterator[Setting]:
        """The settings with fewest savings that may fit, given the bytes that ``setting`` needs."""
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
                    if changed not in self._before:
                        self._unlikely[changed] = None

    def _candidate(self, setting: Setting, guess_secs: float) -> Candidate:
        request, before = self._request, self._before[setting]
        least_bytes = self._bounds.least_bytes(setting)
        period = (setting.pp + request.recycle) * (2 if setting.duplex else 1)

        def follow(trial: Trial) -> Iterator[Candidate]:
            self._results.add(_seen_of(trial))
            if trial.secs < self._ranking.best_secs:
                self._share = SHARE
            is_bound = trial.lacks_memory and trial.peak_bytes <= least_bytes
            self._ranking.learn(setting, replace(trial, peak_bytes=0) if is_bound else trial)
            if before is not None and _seen_of(trial) == _seen_of(before):
                # The change had no effect, so its followers are those of the unchanged setting.
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
            bound_secs=self._bounds.secs,
            guess_secs=guess_secs,
            least_bytes=least_bytes,
            look=Look(period, ROUNDS + 2 * (setting.chunks - 1), filling.sizes),
            follow=follow,
        )

    # --- others ---------------------------------------------------------------------------------

    def _add_other(self, candidate: Candidate) -> None:
        """Queue another planner's candidate, and after its trial the candidates that follow it."""

        def follow(trial: Trial) -> Iterator[Candidate]:
            if trial.secs < self._ranking.best_secs:
                self._ranking.best_secs, self._share = trial.secs, LEADING
            for each in candidate.follow(trial):
                self._add_other(each)
            return iter(())

        waits = replace(candidate, follow=follow)
        heapq.heappush(self._others, (candidate.guess_secs, next(self._numbers), waits))


def _seen_of(trial: Trial) -> tuple[float, int]:
    return trial.secs, trial.peak_bytes
