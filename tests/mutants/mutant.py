"""Mutants as values: one operator, number or name in one line of one function is another one.

A mutant is found by its function and the text of its line, and not by a file and a line number:
code that has only moved keeps its mutants.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rvdcomm", "superscaler_core")
SET = Path(__file__).with_name("mutants.json")

_OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        function: qualified name of the function, within its module.
        line: text of the line without its indentation; ``nth`` counts equal lines of the function.
        start, end: columns of the expression that changes, counted without the indentation.
        fault: the expression in its place.
    """

    function: str
    line: str
    nth: int
    start: int
    end: int
    fault: str


@dataclass(frozen=True)
class Site:
    """Where a mutant is in a tree: a file, and its line's index."""

    path: Path
    index: int


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions of a module with their qualified names, outer ones first."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                own = f"{name}.{child.name}" if name else child.name
                if isinstance(child, ast.FunctionDef):
                    yield own, child
                yield from within(child, own)
            else:
                yield from within(child, name)

    return within(tree, "")


def _expressions(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Expressions of a function's body, without texts, patterns and inner functions."""
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if isinstance(
            node, ast.FunctionDef | ast.ClassDef | ast.JoinedStr | ast.Raise | ast.Assert
        ):
            continue
        if isinstance(node, ast.AnnAssign):
            todo += [node.value] if node.value else []
            continue
        if isinstance(node, ast.match_case):
            todo += [*node.body, *([node.guard] if node.guard else [])]
            continue
        if isinstance(node, ast.expr):
            yield node
        todo += ast.iter_child_nodes(node)


def _fault(node: ast.expr, text: str) -> str | None:
    """A faulty expression in place of one, or None."""

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> str | None:
        if type(operator) not in _OPERATORS:
            return None
        old, new = _OPERATORS[type(operator)]
        start, end = left.end_col_offset - node.col_offset, right.col_offset - node.col_offset
        found = text[start:end]
        return text[:start] + found.replace(old, new, 1) + text[end:] if old in found else None

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return between(left, right, operator)
        case ast.BinOp(left=left, right=right, op=operator):
            return between(left, right, operator)
        case ast.BoolOp(values=[left, right, *_], op=operator):
            return between(left, right, operator)
        case ast.UnaryOp(op=ast.Not()):
            return text.removeprefix("not ")
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    return None


def candidates(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_text()
    lines = source.splitlines()
    for name, function in functions(ast.parse(source)):
        seen: dict[str, list[int]] = {}
        for index in range(function.lineno - 1, function.end_lineno or 0):
            seen.setdefault(lines[index].strip(), []).append(index)
        for node in _expressions(function):
            if node.lineno != node.end_lineno or not lines[node.lineno - 1].isascii():
                continue
            line = lines[node.lineno - 1]
            fault = _fault(node, line[node.col_offset : node.end_col_offset])
            if fault is not None:
                indent = len(line) - len(line.lstrip())
                nth = seen[line.strip()].index(node.lineno - 1)
                start, end = node.col_offset - indent, (node.end_col_offset or 0) - indent
                yield Mutant(name, line.strip(), nth, start, end, fault)


def draw(num: int, seed: int = 0) -> list[Mutant]:
    """A random set of mutants of different lines, the same for the same tree and seed."""
    every = [
        mutant
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for mutant in candidates(path)
    ]
    random.Random(seed).shuffle(every)
    lines: dict[tuple[str, str], Mutant] = {}
    for mutant in every:
        lines.setdefault((mutant.function, mutant.line), mutant)
    return [*lines.values()][:num]


def read() -> list[Mutant]:
    """The fixed set."""
    return [Mutant(**each) for each in json.loads(SET.read_text())]


def write(mutants: Sequence[Mutant]) -> None:
    """Keep a set."""
    SET.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in mutants) + "\n]\n")


def sites(mutants: Sequence[Mutant], root: Path = ROOT) -> dict[int, Site]:
    """Where the mutants of a set are in a tree, by number; without those whose code is gone."""
    wanted: dict[tuple[str, str], list[int]] = {}
    for number, mutant in enumerate(mutants):
        wanted.setdefault((mutant.function, mutant.line), []).append(number)
    names = {mutant.function for mutant in mutants}
    found: dict[int, Site] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            source = path.read_text()
            lines = source.splitlines()
            for name, function in functions(ast.parse(source)):
                if name not in names:
                    continue
                seen: dict[str, int] = {}
                for index in range(function.lineno - 1, function.end_lineno or 0):
                    text = lines[index].strip()
                    nth = seen.get(text, 0)
                    seen[text] = nth + 1
                    for number in wanted.get((name, text), ()):
                        if mutants[number].nth == nth:
                            found.setdefault(number, Site(path, index))
    return found


def put(mutant: Mutant, site: Site, expression: str) -> None:
    """Write another expression in place of a mutant's into its file."""
    lines = site.path.read_text().splitlines(keepends=True)
    line = lines[site.index]
    indent = len(line) - len(line.lstrip())
    start, end = mutant.start + indent, mutant.end + indent
    lines[site.index] = line[:start] + expression + line[end:]
    site.path.write_text("".join(lines))
