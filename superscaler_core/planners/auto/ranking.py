"""Ranking: select the waiting setting to look at next, from the trials so far.

The choice is the setting with the largest expected improvement of the best step, times the
probabilities that it fits in memory and that the model can be cut by it. These are computed from
the guesses and their learned errors (``Learned``). So a search follows fast settings, and turns to
unknown ones when the fast ones promise little more. It begins with one look at every promising
layout, and now and then takes a small gain that is nearly sure.

Source: Gardner et al., "Bayesian Optimization with Inequality Constraints" (2014).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import e, exp, inf, log, pi, sqrt

import numpy as np
from scipy.special import ndtr

from superscaler_core.planners.auto.guess import Guess
from superscaler_core.planners.auto.learned import Floats, Learned, place
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.search.request import Trial

ROUGH_BYTES = 1.0
"""Standard deviations of memory guesses' errors, relative to those of time guesses."""

RANKED, ALL_RANKED = 512, 32
"""Settings that are ranked at a choice, and choices after which all settings are ranked anew.

Settings without a rank are ranked first, then those of the highest ranks.
"""

NEAR, NEARER = 1.15, 1.05
"""Settings within these factors of the least guessed step are looked at before any ranking.

They are the best of each layout within ``NEAR``, then all others within ``NEARER``.
"""

SURE, SURE_EVERY = 0.15, 3
"""Factor on standard deviations at every ``SURE_EVERY``-th choice, to take a nearly sure gain.

Otherwise unknown settings with a larger expected improvement would always come before small gains.
"""

LEAST_SURE = 0.01
"""Least probability that the model can be cut by a setting, whatever other settings showed."""


@dataclass(frozen=True)
class _Waiting:
    """The guesses for a setting that waits.

    Attributes:
        place: coordinates of the setting, as in ``learned.place``.
        secs, num_bytes: logarithms of the guessed seconds and bytes.
    """

    place: Floats
    secs: float
    num_bytes: float


class Ranking:
    """The waiting settings, and what was learned from those that were looked at.

    Args:
        guess: estimates of time and memory.
        memory_bytes: memory of a device.

    Attributes:
        best_secs: seconds of the fastest step so far.
    """

    def __init__(self, guess: Guess, memory_bytes: int) -> None:
        self._guess, self._memory = guess, log(memory_bytes)
        self._secs, self._bytes = Learned(), Learned(ROUGH_BYTES)
        # Learns logarithms: 0 where the model can be cut by the setting, 1 where it cannot.
        self._failures = Learned()
        self._waiting: dict[Setting, _Waiting] = {}
        self._ranks: dict[Setting, float] = {}
        self._first: deque[Setting] = deque()
        self._num_taken = 0
        self.best_secs = inf

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, setting: Setting) -> float:
        """Add a waiting setting; return the bytes that it is expected to need."""
        where, num_bytes = place(setting), self._guess.num_bytes(setting)
        self._waiting[setting] = _Waiting(where, log(self._guess.secs(setting)), log(num_bytes))
        return num_bytes * exp(self._bytes.at([where]).mean[0])

    def begin_with_layouts(self) -> None:
        """Take the best waiting setting of every layout first, if it is near the best of all.

        Trials of one layout tell little about another, so errors of guesses could hide the best
        layout until the search ends. For the same reason, all other settings that seem nearly as
        good follow: trials with fetched weights tell little about settings without.
        """
        fitting = {s: w.secs for s, w in self._waiting.items() if w.num_bytes <= self._memory}
        best: dict[Hashable, Setting] = {}
        for setting in sorted(fitting, key=lambda each: fitting[each]):
            best.setdefault((setting.family, setting.dp, setting.tp, setting.pp), setting)
        least = min(fitting.values(), default=inf)
        near = [each for each in best.values() if fitting[each] <= least + log(NEAR)]
        nearer = [each for each in fitting if fitting[each] <= least + log(NEARER)]
        self._first.extend(dict.fromkeys((*near, *nearer)))

    def take(self) -> tuple[Setting, float]:
        """Remove and return the setting to look at next, with its expected seconds of a step."""
        if self._first:
            first = self._first.popleft()
            return first, exp(self._waiting.pop(first).secs)
        ranks = self._ranks
        num = len(self._waiting) if self._num_taken % ALL_RANKED == 0 else RANKED
        self._num_taken += 1
        some = heapq.nlargest(num, self._waiting, key=lambda each: ranks.get(each, inf))
        waiting = [self._waiting[each] for each in some]
        places = [each.place for each in waiting]
        secs, needs = self._secs.at(places), self._bytes.at(places)
        means = np.array([each.secs for each in waiting]) + secs.mean
        # Before anything fits, the least expected time stands in for the best step.
        best = log(self.best_secs) if self.best_secs < inf else means.min()
        room = self._memory - needs.mean - np.array([each.num_bytes for each in waiting])
        chances = ndtr(room / needs.deviation)
        chances *= np.clip(1 - self._failures.at(places).mean, LEAST_SURE, 1)
        found = _improvement(best - means, secs.deviation) * chances
        ranks.update(zip(some, found.tolist(), strict=True))
        if self._num_taken % SURE_EVERY == 0:
            found = _improvement(best - means, SURE * secs.deviation) * chances
        best_place = int(np.argmax(found))
        del self._waiting[some[best_place]]
        return some[best_place], exp(means[best_place])

    def learn(self, setting: Setting, trial: Trial) -> None:
        """Learn the errors of a setting's guesses from its trial.

        Args:
            setting: the setting that was looked at.
            trial: the result; ``peak_bytes`` is 0 if the memory was not measured.
        """
        self._failures.see(setting, 1.0 if trial.fits or trial.lacks_memory else e)
        if trial.peak_bytes:
            self._bytes.see(setting, trial.peak_bytes / self._guess.num_bytes(setting))
        if trial.fits:
            self._secs.see(setting, trial.secs / self._guess.secs(setting))
            self.best_secs = min(self.best_secs, trial.secs)


def _improvement(better: Floats, deviation: Floats) -> Floats:
    """Expected improvement: the mean of ``max(0, x)`` for normal variables x.

    Args:
        better: means of the variables.
        deviation: standard deviations of the variables.
    """
    ratio = better / deviation
    found: Floats = deviation * np.exp(-(ratio**2) / 2) / sqrt(2 * pi) + better * ndtr(ratio)
    return found
