"""SProgram: what fills the plans of one model, whatever the shape of its batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from superscaler_core.checks import one_of
from superscaler_core.errors import PlanError
from superscaler_core.plan import DECISIONS_SUFFIX, Decisions, Plan
from superscaler_core.plans import PLANS, every
from superscaler_core.plans.option_texts import parse_plan, value_of

_MICROBATCHES = "microbatches"
"""The option by which shipped plans take the number of microbatches."""


@dataclass(frozen=True)
class Decided:
    """Fills plans by decisions that were saved, for their batch or another one."""

    path: str
    decisions: Decisions
    decides_keep: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return self.path

    @classmethod
    def of(cls, path: str) -> Decided:
        """The decisions of a file.

        Raises:
            PlanError: there is no such file, or it is no plan; the message names it.
        """
        try:
            return cls(path, Decisions.load(path))
        except OSError as error:
            raise PlanError(f"plan={path!r}: {error.strerror or error}.") from None

    def __call__(self, plan: Plan) -> None:
        plan.decide(self.decisions, fit=True)


@dataclass(frozen=True)
class SProgram:
    """A function that fills a plan, with the values of its options by name."""

    function: Callable[..., None]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: str | Callable[..., None], options: Mapping[str, Any] | None = None
    ) -> SProgram:
        """A shipped plan by its name, which options may follow (``hybrid:tp=2``), or a function, or
        a file of decisions (``best.plan``), which are fitted to other batches.

        Raises:
            PlanError: there is no plan of that name, or it takes no such option, or the file cannot
                be read.
        """
        if isinstance(plan, str) and plan.endswith(DECISIONS_SUFFIX):
            plan = Decided.of(plan)
        if isinstance(plan, str) and f"{DECISIONS_SUFFIX}:" in plan:
            raise PlanError(f"{plan!r}: a file of decisions says everything, and takes no options.")
        plan, said = parse_plan(plan) if isinstance(plan, str) else (plan, {})
        if isinstance(plan, str):
            one_of("plan", plan, PLANS)
        options = {name: value_of(plan, name, value) for name, value in (options or {}).items()}
        made = cls(PLANS[plan] if isinstance(plan, str) else plan, {**said, **options})
        known = {*made._takes, *every.NAMES}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in made._takes.values())
        unknown = [] if takes_any else [name for name in made.options if name not in known]
        if unknown:
            takes = ", ".join([*made._takes][1:]) or "nothing"
            raise PlanError(
                f"{made.name} takes no {', '.join(unknown)}; it takes {takes}, and every plan "
                f"{', '.join(every.NAMES)}."
            )
        num = made.options.get(_MICROBATCHES, 1)
        if isinstance(num, int) and num < 1:
            raise PlanError(f"{made.name} takes at least one microbatch, not {num}.")
        return made

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that its options or defaults ask for; 1 if it takes none."""
        asked = self._takes.get(_MICROBATCHES)
        return int(self.options.get(_MICROBATCHES, 1 if asked is None else asked.default))

    def __call__(self, plan: Plan, num_microbatches: int) -> None:
        """Fill a plan without decisions, with so many microbatches if the function can choose."""
        chooses = _MICROBATCHES in self._takes or _MICROBATCHES in self.options
        more = {_MICROBATCHES: num_microbatches} if chooses else {}
        every.fill(plan, self.function, {**self.options, **more})

    @property
    def _takes(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters
