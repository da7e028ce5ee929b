"""Text of annotations: parses texts such as ``m k+, k n -> m n`` into operands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.sliding import PATTERN, SlidingWindow

Loops = tuple[str, ...]
"""The identifiers of one dim, outermost first; ``()`` for a dim of size 1."""

Dim = Loops | SlidingWindow

_TOKEN = re.compile(rf"\s*(\(|\)|->|,|{PATTERN}|[A-Za-z_][A-Za-z0-9_.]*[+^]?|1)")


def operands_of(text: str) -> Iterator[tuple[tuple[Dim, ...], bool]]:
    """Every operand with its marks, and whether ``->`` follows it.

    Raises:
        AnnotationError: the text is malformed; the message says where.
    """
    dims: list[Dim] = []
    inner: list[str] | None = None
    at, any_word = 0, False
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise AnnotationError(
                f"cannot parse annotation {text!r}: unexpected {text[at:].strip()[:1]!r} at column "
                f"{len(text) - len(text[at:].lstrip()) + 1}."
            )
        token, at = found[1], found.end()
        if token in (",", "->"):
            if inner is not None:
                raise AnnotationError(f"cannot parse annotation {text!r}: '(' is not closed.")
            if any_word or token == ",":
                yield tuple(dims), token == "->"
            elif token == "->":  # Without inputs, the op would make a tensor from nothing.
                raise AnnotationError(f"cannot parse annotation {text!r}: no input before '->'.")
            dims, any_word = [], False
            continue
        any_word = True
        if re.fullmatch(PATTERN, token):
            if inner is not None:
                raise AnnotationError(
                    f"cannot parse annotation {text!r}: the window {token} is a dim of its own, "
                    "outside of '( )'."
                )
            dims.append(SlidingWindow.parse(token))
        elif token == "(":
            inner = []
        elif token == ")":
            if inner is None:
                raise AnnotationError(f"cannot parse annotation {text!r}: ')' without '('.")
            if inner:
                dims.append(tuple(inner))
            inner = None
        elif inner is not None:
            inner += [token] if token != "1" else []
        else:
            dims.append((token,) if token != "1" else ())
    if inner is not None:
        raise AnnotationError(f"cannot parse annotation {text!r}: '(' is not closed.")
    yield tuple(dims), False
