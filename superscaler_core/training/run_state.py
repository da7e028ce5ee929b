"""RunState: what a checkpoint says of a run beside tensors, as a text that is checked when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import rvdcomm as rv
from superscaler_core.training.optimizer_state import ParamGroup
from superscaler_core.training.plain import text_of, value_of
from superscaler_core.training.random_state import check_random_state


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Laws (tests/superscaler_core/training/test_run_state.py): ``RunState.of_text(x.text).text`` is
    ``x.text``; a text that no run gives raises CheckpointError.

    Attributes:
        groups: the optimizers' groups.
        schedulers: the states of the schedulers.
        scaler: the state of the gradient scaler, or None.
        step, extra: the caller's.
        dropout: seed and number of draws of the program's dropout.
        random: the different random states of ranks.
        random_of_rank: which of these each rank has.
        id: a text that no other save has; empty in checkpoints of earlier versions.
        kinds: the classes of the schedulers; none in checkpoints of earlier versions.
    """

    groups: Sequence[ParamGroup]
    schedulers: Sequence[Mapping[str, Any]]
    scaler: Any
    step: int | None
    extra: Any
    dropout: tuple[int, int] | None
    random: Sequence[dict[str, Any]]
    random_of_rank: Sequence[int]
    id: str = ""
    kinds: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The text in the checkpoint."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return text_of({**values, "groups": [group.plain for group in self.groups]}, "state")

    @classmethod
    def of_text(cls, text: str) -> RunState:
        """Read what ``text`` gives.

        Raises:
            CheckpointError: the text has another form.
        """
        try:
            found = value_of(text)
            made = cls(
                **{**found, "groups": [ParamGroup.of_plain(group) for group in found["groups"]]}
            )
            for name, is_right in _FORMS.items():
                if not is_right(getattr(made, name)):
                    raise ValueError(f"{name} is {getattr(made, name)!r:.80}")
            if not all(0 <= number < len(made.random) for number in made.random_of_rank):
                raise ValueError(f"random_of_rank is {made.random_of_rank!r:.80}")
            for state in made.random:
                check_random_state(state)
        except (ValueError, TypeError, KeyError) as error:
            raise rv.CheckpointError(
                f"the state of its run is damaged ({type(error).__name__}: {error})"
            ) from None
        return made

    def random_here(self, place: int) -> dict[str, Any]:
        """The random state of a rank, by its place; ranks that the run did not have: the first."""
        return self.random[self.random_of_rank[place if place < len(self.random_of_rank) else 0]]


def _all(kind: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list | tuple) and all(type(each) is kind for each in x)


_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "schedulers": lambda x: isinstance(x, list) and all(isinstance(each, dict) for each in x),
    "step": lambda x: x is None or type(x) is int,
    "dropout": lambda x: x is None or (_all(int)(x) and len(x) == 2),
    "random": lambda x: _all(dict)(x) and len(x) > 0,
    "random_of_rank": lambda x: _all(int)(x) and len(x) > 0,
    "id": lambda x: isinstance(x, str),
    "kinds": _all(str),
}
"""The form of each value of a state that is not read as it is used."""
