"""Free: ``del`` of what a generated function no longer needs, so that memory follows use."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from superscaler_core.codegen.text import INDENT


def freed(text: str) -> str:
    r"""A function whose variables are deleted after their last use.

    Python keeps local variables until a function returns, and with them tensors that nobody reads
    any more. Arguments belong to the caller, what is returned too.

    >>> print(freed("def f(x):\n    y = x + 1\n    z = y * 2\n    w = z - 1\n    return w"))
    def f(x):
        y = x + 1
        z = y * 2
        del y
        w = z - 1
        return w
    """
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body
    last_use: dict[str, int] = {}
    made: set[str] = set()
    for number, statement in enumerate(body):
        for name in _names(statement):
            last_use[name.id] = number
            if isinstance(name.ctx, ast.Store):
                made.add(name.id)
    # Behind the last of these the function returns, which lets go of all that is left.
    end = len(body) - (2 if isinstance(body[-1], ast.Return) else 1)
    dead: dict[int, list[str]] = {}
    for name_id, number in last_use.items():
        if name_id in made and number < end:
            dead.setdefault(body[number].end_lineno or 0, []).append(name_id)
    lines = text.split("\n")
    for line in sorted(dead, reverse=True):
        lines.insert(line, f"{INDENT}del {', '.join(dead[line])}")
    return "\n".join(lines)


def _names(statement: ast.stmt) -> Iterator[ast.Name]:
    return (node for node in ast.walk(statement) if isinstance(node, ast.Name))
