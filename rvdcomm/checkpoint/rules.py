"""Rules: patterns that give every tensor of the result its layout and its name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from rvdcomm.checkpoint.folder import read_file
from rvdcomm.checkpoint.steps import KINDS, RuleStep, step_of, toml_text
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout, parse_ranges, ranges_text
from rvdcomm.text import quoted

MAX_BYTES = 16 << 20
RENAME_SECS = 20.0
"""Time limit for applying one pattern to all names; a million names take less than two seconds."""

MAX_NAME_LENGTH = 1 << 16
_TABLES = ("layouts", "rename")
_KEYS = ("ranks", *_TABLES, *KINDS)


@dataclass(frozen=True)
class Rules:
    """Patterns for layouts and for names, applied in the order in which they are given.

    Args:
        layouts: globs on names of the result, each with a layout such as ``"R(1)V(1)D(4,1)"``. The
            layout may be followed by ``ranks(...)`` and ``cuts(...)`` as in ``str(Layout)``. The
            first glob that matches is used. A tensor without a match is replicated over ``ranks``.
        rename: regular expressions with replacements, as for ``re.sub``. All are applied, one after
            another, to the names of the source. Each may take ``RENAME_SECS`` for all names.
        ranks: the ranks of the result.
        steps: how tensors are cut, joined, turned and padded, under the names after ``rename``. All
            steps of one kind are applied before those of the next, in the order of ``KINDS``.

    Law (tests/checkpoint/test_rules.py): ``Rules.parse(str(x)) == x``.

    >>> rules = Rules({"*.down.weight": "R(1)V(1)D(1,2)"}, {"^model[.]": ""}, ranks=range(2))
    >>> str(rules.layout(rules.name("model.down.weight"), (4, 6)))
    'R(2)V(1)D(1,1) shape(4,6) ranks(0,1)'
    >>> str(rules.layout(rules.name("model.0.down.weight"), (4, 6)))
    'R(1)V(1)D(1,2) shape(4,6) ranks(0,1)'
    """

    layouts: tuple[tuple[str, str], ...]
    rename: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    steps: tuple[RuleStep, ...]

    def __init__(
        self,
        layouts: Mapping[str, str] | None = None,
        rename: Mapping[str, str] | None = None,
        ranks: Iterable[int] = (0,),
        steps: Iterable[RuleStep] = (),
    ) -> None:
        object.__setattr__(self, "layouts", tuple((layouts or {}).items()))
        object.__setattr__(self, "rename", tuple((rename or {}).items()))
        object.__setattr__(self, "ranks", tuple(ranks))
        order = list(KINDS)
        ordered = sorted(steps, key=lambda step: order.index(step.kind))
        object.__setattr__(self, "steps", tuple(ordered))
        for step, after in pairwise(sorted(ordered, key=_key)):
            if _key(step) == _key(after):
                raise LayoutError(
                    f"{after} is a second step of its kind for {after.names!r}, and a table has "
                    "one line for each name; reshard twice."
                )
        if not self.ranks:
            raise LayoutError("rules need at least one rank; give ranks such as '0:4'.")
        for pattern, replacement in self.rename:
            try:
                re.compile(pattern)
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                raise LayoutError(
                    f"cannot rename {pattern!r} to {replacement!r}: {error}; expected a regular "
                    "expression and its replacement."
                ) from None

    @classmethod
    def load(cls, path: str | Path) -> Rules:
        """Read rules from a TOML file, or from a JSON file of the same form.

        Raises:
            LayoutError: the file has another form.
        """
        path = Path(path)
        try:
            data = read_file(path, MAX_BYTES)
            parse = json.loads if path.suffix == ".json" else tomllib.loads
            return cls._of_values(parse(data.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"{path} has no rules: {str(error).rstrip('.')}.") from None

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Read rules from the text of a TOML file.

        Raises:
            LayoutError: the text has another form.
        """
        try:
            return cls._of_values(tomllib.loads(text))
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"the text has no rules: {str(error).rstrip('.')}.") from None

    def __str__(self) -> str:
        lines = [f"ranks = {toml_text(ranges_text(self.ranks))}"]
        for table in _TABLES:
            items = getattr(self, table)
            lines += [f"[{table}]"] if items else []
            lines += [f"{toml_text(key)} = {toml_text(value)}" for key, value in items]
        for kind in KINDS:
            steps = [step for step in self.steps if step.kind == kind]
            lines += [f"[{kind}]"] if steps else []
            lines += [step.line for step in steps]
        return "\n".join(lines) + "\n"

    @classmethod
    def _of_values(cls, values: Any) -> Rules:
        known = ", ".join(_KEYS)
        if not isinstance(values, dict) or not set(values) <= set(_KEYS):
            raise LayoutError(f"expected {known}, got {quoted(list(values))}")
        for key, value in values.items():
            texts = [value]
            if key != "ranks" and isinstance(value, dict):
                texts = list(value.values()) if key in _TABLES else []
            if (key != "ranks") != isinstance(value, dict) or not all(
                isinstance(text, str) for text in texts
            ):
                raise LayoutError(
                    f"{key!r} is {quoted(value)}; expected ranks = '0:4', tables of texts "
                    "for layouts and rename, and tables for steps"
                )
        steps = [
            step_of(kind, names, value)
            for kind in KINDS
            for names, value in values.get(kind, {}).items()
        ]
        ranks = parse_ranges(values["ranks"]) if "ranks" in values else (0,)
        return cls(values.get("layouts"), values.get("rename"), ranks, steps)

    def name(self, source_name: str) -> str:
        """The name that a tensor of the source gets in the result (see ``names``)."""
        return self.names([source_name])[source_name]

    def names(self, source_names: Iterable[str]) -> dict[str, str]:
        """The names that tensors of the source get in the result, by their names in the source.

        Raises:
            LayoutError: a pattern matches no name, takes longer than ``RENAME_SECS``, as a regular
                expression such as ``(a+)+$`` does on some names, or makes names longer than
                ``MAX_NAME_LENGTH``.
        """
        before = list(source_names)
        after = before
        for pattern, replacement in self.rename:
            after = _renamed(pattern, replacement, after)
        return dict(zip(before, after, strict=True))

    def pattern(self, name: str) -> str | None:
        """The first glob that matches a name of the result; None if no glob matches."""
        return next((glob for glob, _ in self.layouts if fnmatchcase(name, glob)), None)

    def check_used(self, names: Iterable[str]) -> None:
        """Raise a LayoutError if a glob of a layout matches none of the names of the result."""
        known = list(names)
        unused = [
            glob for glob, _ in self.layouts if not any(fnmatchcase(name, glob) for name in known)
        ]
        if unused:
            raise _no_match("layouts", unused, known)

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        """The layout of the tensor that has this name in the result.

        Raises:
            LayoutError: the layout does not fit the shape or the ranks.
        """
        glob = self.pattern(name)
        if glob is None:
            ones = ",".join("1" * len(shape))
            return Layout(shape, f"R({len(self.ranks)})V(1)D({ones})", self.ranks)
        text = dict(self.layouts)[glob]
        counts, _, rest = text.strip().partition(" ")
        try:
            full = f"{counts} shape({','.join(map(str, shape))}) {rest}".strip()
            layout = Layout.parse(full)
            if "ranks(" not in rest:
                layout = Layout(shape, layout.rvd, self.ranks, layout.cuts)
        except LayoutError as error:
            raise LayoutError(
                f"tensor {name!r} of shape {list(shape)}, rule {glob!r} = {text!r}: {error}"
            ) from None
        strangers = sorted(set(layout.ranks) - set(self.ranks))
        if strangers:
            raise LayoutError(
                f"tensor {name!r}, rule {glob!r} = {text!r} names rank {strangers[0]}; the ranks "
                f"are {quoted(self.ranks)}."
            )
        return layout


def _key(step: RuleStep) -> tuple[str, str]:
    """The table and the key of a step in TOML."""
    return step.kind, step.names


_RENAME = """
import json, re, sys
pattern, replacement, names, most = json.load(sys.stdin)
renamed, num_matches = [], 0
for name in names:
    text, count = re.subn(pattern, replacement, name)
    renamed.append(text)
    num_matches += count
    if len(text) > most:
        sys.exit(3)
json.dump([num_matches, renamed], sys.stdout)
"""
_TOO_LONG = 3


def _renamed(pattern: str, replacement: str, names: list[str]) -> list[str]:
    """Apply ``re.sub`` to names in a separate process: a thread could not be stopped in time."""
    request = json.dumps([pattern, replacement, names, MAX_NAME_LENGTH])
    command = [sys.executable, "-I", "-S", "-c", _RENAME]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=RENAME_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LayoutError(
            f"renaming {len(names)} tensors by {pattern!r} took longer than {RENAME_SECS:g} s; "
            "use a pattern without nested repetitions."
        ) from None
    if done.returncode == _TOO_LONG:
        raise LayoutError(
            f"renaming by {pattern!r} gives a name of more than {MAX_NAME_LENGTH} characters."
        )
    if done.returncode:
        raise LayoutError(f"renaming by {pattern!r} failed: {quoted(done.stderr[-160:])}.")
    num_matches: int
    renamed: list[str]
    num_matches, renamed = json.loads(done.stdout)
    if names and not num_matches:
        raise _no_match("rename", [pattern], names)
    return renamed


def _no_match(table: str, patterns: list[str], names: list[str]) -> LayoutError:
    what = "pattern" if len(patterns) == 1 else "patterns"
    return LayoutError(
        f"[{table}] has the {what} {quoted(patterns)[1:-1]}, which no tensor matches; the "
        f"{len(names)} tensors have names such as {quoted(sorted(names)[:3])[1:-1]}."
    )
