"""Invocation: a call of one function, as a record from which its text is printed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Invocation:
    """The single function call that an op computes; arguments can be added to it.

    Law (tests/superscaler_core/graph/test_invocation.py): the text with a keyword added is the call
    with that further argument.

    Attributes:
        function: the function's text, such as ``F.linear``.
        args: texts of the arguments, which may have the fields of ``Op.code``.
        keywords: names and texts of keyword arguments.

    >>> str(Invocation("F.linear", ("{x0}", "{x1}")).adding("bias", "{bias}"))
    'F.linear({x0}, {x1}, bias={bias})'
    """

    function: str
    args: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...] = ()

    def adding(self, name: str, text: str) -> Invocation:
        """The same call with a further keyword argument."""
        return replace(self, keywords=(*self.keywords, (name, text)))

    def replace(self, old: str, new: str) -> Invocation:
        """The same call with a text replaced in its arguments, as ``str.replace``."""
        keywords = tuple((name, text.replace(old, new)) for name, text in self.keywords)
        return replace(self, args=tuple(a.replace(old, new) for a in self.args), keywords=keywords)

    def __str__(self) -> str:
        words = [*self.args, *(f"{name}={text}" for name, text in self.keywords)]
        return f"{self.function}({', '.join(words)})"
