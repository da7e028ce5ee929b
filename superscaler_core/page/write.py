"""Write: a document and its view as one file, which needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rvdcomm.whole_file import replacing
from superscaler_core.errors import PlanError
from superscaler_core.page.candidate_row import CandidateRow
from superscaler_core.page.document import document_of
from superscaler_core.simulator import Simulated

SCRIPTS = ("texts", "acts", "drawing", "hover", "moving", "tables", "main")
"""The parts of the script, in their order. They share one scope, which is closed."""

SUFFIXES = (".html", ".htm")

_PLACE = re.compile(r"\{\{(\w+)\}\}")

# Inside a script block, only these could end it or begin a comment.
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}


def save_page(found: Simulated, path: str | Path, candidates: Iterable[CandidateRow] = ()) -> None:
    """Write the page of a simulated step.

    Args:
        found: the simulated step.
        path: name of the file, in .html or .htm.
        candidates: the candidates of the search that chose the plan, if there was one.

    Raises:
        PlanError: the name has another suffix.
        OSError: the file cannot be written.
    """
    check_name(path)
    text = page_text(document_of(found, candidates))
    with replacing(path) as name:
        name.write_text(text, encoding="utf-8")


def check_name(path: str | Path) -> None:
    """Refuse the name of a page that no browser would open as one.

    Raises:
        PlanError: the name has another suffix than .html or .htm.
    """
    if Path(path).suffix not in SUFFIXES:
        raise PlanError(
            f"cannot write a page to {str(path)!r}: use a name in {' or '.join(SUFFIXES)}."
        )


def page_text(document: Mapping[str, Any]) -> str:
    """The page of a document: its view, with the document in a script block of JSON."""
    fields = {
        "title": escape(str(document["title"])),
        "style": _resource("page.css"),
        "script": _script(),
        "document": json.dumps(document, separators=(",", ":"), allow_nan=False).translate(_UNSAFE),
    }
    # All places are filled at once: texts that look like a place are never filled.
    return _PLACE.sub(lambda found: fields[found[1]], _resource("page.html"))


def _script() -> str:
    parts = "\n".join(_resource(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
