"""Ranking: which of the settings that wait to look at next, by what was seen so far.

The one with the largest expected improvement of the best step, times the probabilities that it fits
in memory and that the model can be cut so. All follow from the guesses and from what these were off
by (``Learned``). So a search follows what is fast, and turns to what it does not know when little
more can be gained there. Before that it sees every promising layout once, and in between it takes
small gains that are nearly sure.

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
"""How rough guesses of memory are, beside those of time."""

RANKED, ALL_RANKED = 512, 32
"""Of the settings that wait, those that were ranked first are ranked anew each time, and all after
so many times."""

NEAR, NEARER = 1.15, 1.05
"""How many times as long as the best of all settings one may be guessed to take that is looked at
before anything is ranked, if it is the best of its layout, and if it is not."""

SURE, SURE_EVERY = 0.15, 3
"""The share of deviations that one of so many choices reckons with: it takes what is nearly sure to
gain a little, which the expected improvement of what is not known would leave for ever."""

LEAST_SURE = 0.01
"""The least probability that a model can be cut so, whatever was seen of other settings."""


@dataclass(frozen=True)
class _Waiting:
    """A setting that waits.

    Attributes:
        place: of the setting, for ``Learned``.
        secs, num_bytes: logarithms of the guesses.
    """

    place: Floats
    secs: float
    num_bytes: float


class Ranking:
    """Settings that wait, and what is known of those that were looked at.

    Args:
        guess: of time and memory.
        memory_bytes: of a device.

    Attributes:
        best_secs: the fastest step so far.
    """

    def __init__(self, guess: Guess, memory_bytes: int) -> None:
        self._guess, self._memory = guess, log(memory_bytes)
        self._secs, self._bytes = Learned(), Learned(ROUGH_BYTES)
        # Factors of 1 where the model could be cut so, and of e where it could not.
        self._failures = Learned()
        self._waiting: dict[Setting, _Waiting] = {}
        self._ranks: dict[Setting, float] = {}
        self._first: deque[Setting] = deque()
        self._num_taken = 0
        self.best_secs = inf

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, setting: Setting) -> float:
        """A setting waits; the bytes that it is expected to need are returned."""
        where, num_bytes = place(setting), self._guess.num_bytes(setting)
        self._waiting[setting] = _Waiting(where, log(self._guess.secs(setting)), log(num_bytes))
        return num_bytes * exp(self._bytes.at([where]).mean[0])

    def begin_with_layouts(self) -> None:
        """Before all else the best of every layout that waits is taken, if it is near the best.

        What is seen of one layout tells little of another, so that errors of guesses could hide
        the best one until the search ends. For the same reason all others follow that are nearly as
        good as the best: weights that are fetched tell little of weights that are not.
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
        """The setting to look at next, which waits no more, and the seconds expected of it."""
        if self._first:
            first = self._first.popleft()
            return first, exp(self._waiting.pop(first).secs)
        if self._num_taken % ALL_RANKED == 0:
            self._ranks.clear()
        self._num_taken += 1
        ranks = self._ranks
        some = heapq.nlargest(RANKED, self._waiting, key=lambda each: ranks.get(each, inf))
        waiting = [self._waiting[each] for each in some]
        places = [each.place for each in waiting]
        secs, needs = self._secs.at(places), self._bytes.at(places)
        means = np.array([each.secs for each in waiting]) + secs.mean
        # As long as nothing fits, the fastest that is expected stands for the best.
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
        """What a trial says of the guesses.

        Args:
            setting: that was looked at.
            trial: what came of it, with the memory that it was seen to need.
        """
        self._failures.see(setting, 1.0 if trial.fits or trial.lacks_memory else e)
        if trial.peak_bytes:
            self._bytes.see(setting, trial.peak_bytes / self._guess.num_bytes(setting))
        if trial.fits:
            self._secs.see(setting, trial.secs / self._guess.secs(setting))
            self.best_secs = min(self.best_secs, trial.secs)


def _improvement(better: Floats, deviation: Floats) -> Floats:
    """What is gained on average of normal variables, where they are above 0.

    Args:
        better: their means.
        deviation: their standard deviations.
    """
    ratio = better / deviation
    found: Floats = deviation * np.exp(-(ratio**2) / 2) / sqrt(2 * pi) + better * ndtr(ratio)
    return found
