"""Auto: the best plan over degrees, schedules, splits, storage, recomputation and overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Protocol

from superscaler_core.evaluation.request import Candidate, Request, Scope, SearchPlanner, Trial
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.estimate import estimate_of
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.options import SettingSpace
from superscaler_core.planners.auto.order import rounds_of
from superscaler_core.planners.auto.others import Others
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import traits_of
from superscaler_core.planners.auto.waiting import Waiting

OWN = 7
"""Evaluations of settings per evaluation of another planner's candidate: every eighth is theirs.

The first seven are of settings: one candidate of another planner, which is evaluated in full and
may have to be searched for, can take longer than all of them.
"""


class Settings(Protocol):
    """A space of settings, such as ``SettingSpace``."""

    def roots(self) -> Iterator[Setting]:
        """The settings with which the search begins."""

    def moves(self, setting: Setting) -> Iterator[Setting]:
        """The changes of a setting that fits."""

    def savings(self, setting: Setting) -> Iterator[Setting]:
        """The changes of a setting that lacks memory."""


def auto(request: Request, *, others: Mapping[str, SearchPlanner] | None = None) -> Proposals:
    """Propose settings for every layout of the devices, and the candidates of other planners.

    The search begins with settings for every layout of the devices. A setting that fits is followed
    by the settings that differ in one choice; one that lacks memory, by settings that need less.
    ``Waiting`` selects the next one by estimates and their errors so far. Candidates of other
    planners take every eighth turn (``Others``), so a search that ends by itself is at least as
    good as each of them.

    With enough time, the search evaluates all settings that these moves reach and whose lower bound
    does not exclude them, and returns the best. With less time its order is a heuristic.

    Args:
        request: the model, cluster and step.
        others: other planners by name, in the order of their turns.
    """
    return Proposals(request, options_of(request), others)


def options_of(request: Request) -> SettingSpace:
    """The settings that a request's model and cluster allow."""
    return SettingSpace(request, traits_of(request.graph_of(request.samples[0])))


class Proposals:
    """The waiting settings and other planners' candidates, most promising first.

    Iterating takes candidates; following a trial (``Candidate.follow``) adds to those that wait.
    """

    def __init__(
        self,
        request: Request,
        settings: Settings,
        others: Mapping[str, SearchPlanner] | None = None,
    ) -> None:
        self._request, self._settings = request, settings
        self._bounds, self._best_secs = Bounds(request), inf
        self._waiting = Waiting(estimate_of(request), request.memory_bytes)
        # Every setting that was added, with the trial of the setting that it changes, if that fits.
        self._before: dict[Setting, Trial | None] = {}
        self._others = Others(request, others or {})
        self._credit: float | None = None  # of other planners, from the first trial of a setting
        self._add(settings.roots())

    def __len__(self) -> int:
        return len(self._waiting) + len(self._others)

    def __iter__(self) -> Iterator[Candidate]:
        while len(self):
            candidate = self._next()
            if candidate is not None:
                yield candidate

    def _next(self) -> Candidate | None:
        is_due = self._credit is not None and self._credit >= 0
        is_theirs = is_due or not self._waiting.has_promising
        if len(self._others) and is_theirs:
            return self._other()
        setting, expected_secs, is_ready = self._waiting.take()
        if is_ready:
            return self._candidate(setting, expected_secs)
        self._waiting.add(setting, is_last=True)
        self._add(self._settings.savings(setting))
        return None

    # --- settings -------------------------------------------------------------------------------

    def _add(self, settings: Iterable[Setting], before: Trial | None = None) -> None:
        """Add those of some settings that are new."""
        for setting in settings:
            if setting not in self._before:
                self._before[setting] = before
                self._waiting.add(setting)

    def _candidate(self, setting: Setting, expected_secs: float) -> Candidate:
        request, before = self._request, self._before[setting]
        period = (setting.pp + request.recycle) * (2 if setting.duplex else 1)

        def follow(trial: Trial) -> Iterator[Candidate]:
            charge = self._charge(trial)
            self._credit = (-OWN * charge if self._credit is None else self._credit) + charge
            self._compare(trial)
            self._waiting.learn(setting, trial)
            # If the change had no effect, its followers are those of the unchanged setting.
            seen = trial.secs, trial.peak_bytes
            if before is None or seen != (before.secs, before.peak_bytes):
                if trial.fits:
                    self._add(self._settings.moves(setting), trial)
                elif trial.lacks_memory:
                    self._add(self._settings.savings(setting))
            return iter(())

        num = request.microbatches(setting.microbatch)
        filling = Filling(setting, request.profile, request.recycle, num)
        return Candidate(
            str(setting),
            setting.microbatch,
            filling,
            bound_secs=self._bounds.secs,
            guess_secs=expected_secs,
            least_bytes=self._bounds.least_bytes(setting),
            quick=Scope(period, rounds_of(setting), filling.sizes),
            follow=follow,
            kinds=setting.kinds,
        )

    # --- other planners -------------------------------------------------------------------------

    def _other(self) -> Candidate | None:
        """The next candidate of another planner, which pays for its proposal and its trial."""
        start = self._request.clock()
        candidate = self._others.take(self._best_secs)
        if not self._request.max_tried:
            self._pay(self._request.clock() - start)
        if candidate is None:
            return None
        followers = candidate.follow

        def follow(trial: Trial) -> Iterator[Candidate]:
            self._pay(self._charge(trial))
            self._compare(trial)
            return iter(followers(trial))

        return replace(candidate, bound_secs=self._bounds.secs, follow=follow)

    def _pay(self, charge: float) -> None:
        """Let other planners wait for as many evaluations of settings as a charge is worth."""
        self._credit = (self._credit or 0.0) - OWN * charge

    def _compare(self, trial: Trial) -> None:
        """Note the fastest step so far."""
        if trial.secs < self._best_secs:
            self._best_secs, self._others.usual_samples = trial.secs, trial.candidate.samples

    def _charge(self, trial: Trial) -> float:
        """What a trial costs: one evaluation if the search counts these, else its seconds."""
        return 1.0 if self._request.max_tried else trial.evaluation_secs
