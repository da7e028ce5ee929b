"""Templates: names with wildcards, which are matched and then filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.errors import LayoutError

_WILDCARD = re.compile(r"([*#])")


@dataclass(frozen=True)
class Template:
    """A name in which ``*`` stands for one or more characters and ``#`` for a number.

    Law (tests/checkpoint/test_template.py): ``x.filled(x.match(name)) == name`` for each name that
    matches. A match takes time in proportion to the length of the name.

    >>> found = Template("*.experts.#.up").match("layers.0.experts.12.up")
    >>> found, Template("*.up.#").filled(found)
    (('layers.0', '12'), 'layers.0.up.12')
    """

    text: str

    @property
    def wildcards(self) -> str:
        """The wildcards, in order."""
        return "".join(_WILDCARD.findall(self.text))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # As in fnmatch: a star ends at the first place where the text up to the next star follows,
        # and atomic groups keep it there. Only the last star has to try all ends. A number has all
        # digits that follow one another, so there is nothing to try.
        first, *rest = (
            "([0-9]++)".join(map(re.escape, piece.split("#"))) for piece in self.text.split("*")
        )
        middle = "".join(f"(?>(.+?){piece})" for piece in rest[:-1])
        last = f"(.+?){rest[-1]}" if rest else ""
        return re.compile(first + middle + last, re.DOTALL)

    def match(self, name: str) -> tuple[str, ...] | None:
        """The texts for the wildcards, in order, or None."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groups()

    def filled(self, texts: tuple[str, ...]) -> str:
        """The name with these texts for the wildcards."""
        left = iter(texts)
        return _WILDCARD.sub(lambda _: next(left), self.text)

    def check_like(self, other: Template) -> None:
        """Raise a LayoutError unless both have the same wildcards in the same order."""
        if self.wildcards != other.wildcards:
            raise LayoutError(
                f"{self.text!r} needs the wildcards of {other.text!r}, in the same order."
            )

    def without_number(self, other: Template) -> int:
        """The place of the last wildcard ``#`` without which both have the same wildcards."""
        own = self.wildcards
        for at in reversed(range(len(own))):
            if own[at] == "#" and own[:at] + own[at + 1 :] == other.wildcards:
                return at
        raise LayoutError(
            f"{self.text!r} needs the wildcards of {other.text!r}, in the same order, and one # "
            "more, for the number."
        )
