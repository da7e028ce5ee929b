"""Waiting: the settings to evaluate, and the order of their evaluations."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from math import inf
from operator import attrgetter

from superscaler_core.evaluation.request import Trial
from superscaler_core.planners.auto.estimate import Estimate, Figures
from superscaler_core.planners.auto.setting import Setting

FASTER = 1.3
"""The most by which a step was faster than its estimate, in 287 settings of the example in
docs/planners.md (duplex with sharded weights)."""


@dataclass(frozen=True, slots=True)
class _Error:
    """Evaluated over estimated figures of a setting; ``secs`` is None if it was not simulated."""

    secs: float | None
    num_bytes: float


class Waiting:
    """The settings that wait, and the errors of the estimates so far.

    The next setting is the one that is expected to be the fastest. If it is not expected to fit,
    the settings that need less memory are added in its place, and it is the last to be evaluated.

    Every second evaluation is of a layout and a way of storing weights that was not yet evaluated,
    as long as one of these may be the fastest (``FASTER``): only an evaluation shows the error of
    all its settings.
    """

    def __init__(self, estimate: Estimate, memory_bytes: int) -> None:
        self._estimate, self._memory_bytes = estimate, memory_bytes
        self._settings: dict[Setting, Figures] = {}
        self._rough: set[Setting] = set()
        self._last: set[Setting] = set()
        self._taken: set[Hashable] = set()
        self._is_new_turn, self._best_secs = False, inf
        self._errors: dict[Hashable, dict[Setting, _Error]] = {}
        self._least_secs = 1.0

    def __len__(self) -> int:
        return len(self._settings)

    @property
    def has_promising(self) -> bool:
        """Whether a setting waits that is not among the last."""
        return any(self._bytes_over(setting) == 0 for setting in self._settings)

    def add(self, setting: Setting, *, is_last: bool = False) -> None:
        """Add a setting.

        One that is the last waits until nothing else does, as long as it is not expected to fit. Of
        such settings, the one that is expected to need least memory comes first.
        """
        self._rough.add(setting)
        self._settings[setting] = self.expected(setting)
        if is_last:
            self._last.add(setting)

    def take(self) -> tuple[Setting, float, bool]:
        """Remove and return the next setting, its expected seconds, and whether to evaluate it."""
        chosen = self._next()
        # The time of what seems not to fit decides nothing yet.
        while chosen in self._rough and (chosen in self._last or self._seems_to_fit(chosen)):
            self._rough.remove(chosen)
            self._settings[chosen] = self.expected(chosen)
            chosen = self._next()
        is_ready = chosen in self._last or self._seems_to_fit(chosen)
        if is_ready:
            self._is_new_turn = not self._is_new_turn
            self._taken.add(_kind(chosen))
        return chosen, self._settings.pop(chosen).secs, is_ready

    def _next(self) -> Setting:
        unseen = self._unseen() if self._is_new_turn else []
        return min(unseen or self._settings, key=self._order)

    def _unseen(self) -> list[Setting]:
        """The settings of kinds that were not yet evaluated and may be the fastest."""
        most = FASTER * self._best_secs
        return [
            setting
            for setting, figures in self._settings.items()
            if figures.secs < most and setting not in self._last
            if _kind(setting) not in self._taken
        ]

    def _order(self, setting: Setting) -> tuple[float, float]:
        return self._bytes_over(setting), self._settings[setting].secs

    def _bytes_over(self, setting: Setting) -> float:
        """The expected bytes of a setting that is among the last; 0 of any other."""
        figures = self._settings[setting]
        return figures.num_bytes if setting in self._last and not self._fits(figures) else 0.0

    def learn(self, setting: Setting, trial: Trial) -> None:
        """Learn the error of a setting's estimate from its trial."""
        estimated = self._estimate.of(setting)
        self._best_secs = min(self._best_secs, trial.secs)
        if not trial.peak_bytes or estimated.num_bytes == inf:
            return
        secs = trial.secs / estimated.secs if trial.fits else None
        self._errors.setdefault(_layout(setting), {})[setting] = _Error(
            secs, trial.peak_bytes / estimated.num_bytes
        )
        is_least = secs is not None and secs < self._least_secs
        self._least_secs = min(self._least_secs, secs or inf)
        for other in self._settings:
            if is_least or _layout(other) == _layout(setting):
                self._settings[other] = self.expected(other)

    def expected(self, setting: Setting) -> Figures:
        """What is expected of a setting: its estimate without the expected error.

        This is the error at the evaluated setting that has the same layout of the devices and
        differs in fewest choices. If these are d, only 1/d of its error is expected, and else the
        most favourable error of all settings, or none. So what is unlike all that was evaluated is
        left out only if it is slower even with little error. Until a setting is the best, a rough
        estimate suffices (``Estimate.near``).
        """
        estimate = self._estimate.near if setting in self._rough else self._estimate.of
        estimated, known = estimate(setting), self._errors.get(_layout(setting), {})
        alike = sorted((_distance(setting, other), i) for i, other in enumerate(known))
        errors = [*known.values()]
        more = (1 + (errors[i].num_bytes - 1) / max(1, d) for d, i in alike)
        secs, least = ((d, errors[i].secs) for d, i in alike), self._least_secs
        near = (least + (error - least) / max(1, d) for d, error in secs if error is not None)
        return Figures(estimated.secs * next(near, least), estimated.num_bytes * next(more, 1.0))

    def _seems_to_fit(self, setting: Setting) -> bool:
        return self._fits(self._settings[setting])

    def _fits(self, figures: Figures) -> bool:
        return figures.num_bytes <= self._memory_bytes


def _layout(setting: Setting) -> Hashable:
    return setting.family, setting.dp, setting.tp, setting.pp


def _kind(setting: Setting) -> Hashable:
    """What settings share whose estimates have about the same error."""
    return _layout(setting), setting.zero == 3, setting.offload


def _distance(setting: Setting, other: Setting) -> int:
    """The number of choices in which two settings differ."""
    return sum(a != b for a, b in zip(_choices(setting), _choices(other), strict=True))


_choices = attrgetter(*(field.name for field in fields(Setting)))
"""All choices of a setting."""
