"""Auto: the best plan over degrees, schedules, splits, storage, recomputation and overlap.

Objective: the simulated time of a step; no device needs more than its memory.

Others' plans: all candidates of all other planners are in the same queue (``others.Others``), so a
search that ends by itself is at least as good as each of them.

Settings: it begins with one for every layout of the devices (data, tensor and pipeline parallel;
axial, interlaced or spatial where the model has what that needs). A setting that fits is followed
by those that differ from it in one choice, and one that lacks memory by those that need less. What
is looked at next is what is hoped to be fastest; what a lower bound says cannot win is not looked
at. So given time it looks at all that these moves reach, and returns the best; with less time it is
a best-first search, whose order is a heuristic. Every setting is compiled and simulated, with few
microbatches and few of the repeated blocks first.

Complexity: a setting takes what compiling and simulating take.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Protocol

from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.guess import Guess
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

CROWD = 0.004
"""What each setting that was proposed for a layout adds to the guesses of its next ones, as a
share: so each layout is seen where it fits before one is seen in all forms."""

HOPELESS = 2.0
"""The guess of memory, as a share of what there is, from which on a first setting is not looked at,
but those that need less."""


class Settings(Protocol):
    """Settings that a planner may choose from, as ``Options`` has them."""

    def roots(self) -> Iterator[Setting]:
        """Those that are looked at first."""

    def moves(self, setting: Setting) -> Iterator[tuple[float, Setting]]:
        """Changes of one that fits."""

    def savings(self, setting: Setting) -> Iterator[Setting]:
        """Changes of one that lacks memory."""


def auto(
    request: Request, *, others: Mapping[str, SearchPlanner] | None = None
) -> Sequence[Candidate]:
    """Propose plans for every layout of the devices and by every other planner; follow the best.

    Args:
        request: what is asked.
        others: planners by name.
    """
    options = options_of(request)
    found = Others(request, options.traits, Bounds(request), others or {})
    return propose_settings(request, options, found)


def options_of(request: Request) -> Options:
    """All that a request's model and cluster allow."""
    return Options(request, Traits(request.graph_of(request.samples[0])))


def propose_settings(
    request: Request, settings: Settings, others: Others | None = None
) -> Sequence[Candidate]:
    """Propose the roots of some settings, and of other planners; follow those that are promising.

    Args:
        request: what is asked.
        settings: to choose from.
        others: candidates of other planners; none if None.
    """
    return list(_Proposals(request, settings, others).roots())


class _Proposals:
    """One search; settings that were proposed are not proposed again."""

    def __init__(self, request: Request, options: Settings, others: Others | None) -> None:
        self._request = request
        self._options = options
        self._others = others
        self._results = set() if others is None else others.results
        self._bounds, self._guess = Bounds(request), Guess(request)
        self._seen: set[Setting] = set()
        self._crowds: Counter[Hashable] = Counter()

    def roots(self) -> Iterator[Candidate]:
        for setting in self._options.roots():
            need_bytes = self._guess.num_bytes(setting)
            is_hopeless = need_bytes > HOPELESS * self._request.memory_bytes
            for first in self._smaller(setting, need_bytes) if is_hopeless else [setting]:
                yield from self._proposed(first, self._guess.secs(first))
        if self._others is not None:
            yield from self._others.roots()

    def _proposed(
        self, setting: Setting, guess_secs: float, before: Trial | None = None
    ) -> Iterator[Candidate]:
        """A setting's candidate, if it is new; ``before`` is the trial that it was a change of."""
        if setting in self._seen:
            return
        self._seen.add(setting)
        layout = setting.family, setting.dp, setting.tp, setting.pp
        self._crowds[layout] += 1
        request, bounds = self._request, self._bounds
        period = (setting.pp + request.recycle) * (2 if setting.duplex else 1)

        def follow(trial: Trial) -> Iterator[Candidate]:
            self._results.add(_seen_of(trial))
            if before is not None and (trial.secs, trial.peak_bytes) == _seen_of(before):
                # The change changed nothing, so what follows it is what follows the other.
                return
            if trial.fits:
                pace = trial.secs / self._guess.secs(setting)
                for hope, changed in self._options.moves(setting):
                    yield from self._proposed(
                        changed, pace * hope * self._guess.secs(changed), trial
                    )
            elif trial.lacks_memory:
                pace = guess_secs / self._guess.secs(setting)
                for changed in self._smaller(setting, trial.peak_bytes):
                    yield from self._proposed(changed, pace * self._guess.secs(changed))

        num = request.microbatches(setting.microbatch)
        filling = Filling(setting, request.profile, request.recycle, num)
        yield Candidate(
            str(setting),
            setting.microbatch,
            filling,
            bound_secs=bounds.secs(setting),
            guess_secs=guess_secs * (1 + CROWD * self._crowds[layout]),
            least_bytes=bounds.least_bytes(setting),
            look=Look(period, filling.sizes),
            follow=follow,
        )

    def _smaller(self, setting: Setting, peak_bytes: float) -> Iterator[Setting]:
        """Settings with fewest savings that may fit, by what this one needs."""
        waiting, seen = deque([setting]), {setting}
        while waiting:
            for changed in self._options.savings(waiting.popleft()):
                if changed in seen:
                    continue
                seen.add(changed)
                need_bytes = self._guess.smaller_bytes(setting, peak_bytes, changed)
                if need_bytes <= self._request.memory_bytes:
                    yield changed
                else:
                    waiting.append(changed)


def _seen_of(trial: Trial) -> tuple[float, int]:
    return trial.secs, trial.peak_bytes
