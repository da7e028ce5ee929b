"""Write: one file without network, which no name in a model can break."""

from __future__ import annotations

import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.page import CandidateRow, document_of, save_page
from superscaler_core.page.write import SCRIPTS, page_text
from tests.superscaler_core.page.pages import HOSTILE, hostile, simulated


class Scripts(HTMLParser):
    """Collects the texts of script blocks, and all attributes that name another file."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.links: list[tuple[str, str | None]] = []
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_inside = tag == "script"
        if self._is_inside:
            self.scripts.append("")
        self.links += [(name, value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.scripts[-1] += data


def parsed(text: str) -> Scripts:
    parser = Scripts()
    parser.feed(text)
    return parser


def test_hostile_names_stay_inside_the_script_block() -> None:
    document = document_of(hostile(), [CandidateRow(HOSTILE, 1.0, 1, HOSTILE)])
    document["title"] = HOSTILE
    assert "</script>" in json.dumps(document["decisions"])
    found = parsed(page_text(document))
    assert len(found.scripts) == 2
    assert json.loads(found.scripts[0]) == json.loads(json.dumps(document))


def test_page_names_no_other_file() -> None:
    text = page_text(document_of(simulated("hybrid")))
    assert parsed(text).links == []
    assert re.findall(r"https?://|@import|url\(|fetch\(|import\(", text) == []
    assert "default-src 'none'" in text


def test_files_of_the_view_are_data_of_the_package() -> None:
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["superscaler_core"]
    folder = root / "superscaler_core" / "page"
    names = {path.name for path in folder.iterdir() if path.suffix not in (".py", "")}
    packed = {path.name for pattern in patterns for path in folder.parent.glob(pattern)}
    scripts = {f"{name}.js" for name in SCRIPTS}
    assert names == packed - {"py.typed"} == {"page.html", "page.css", *scripts}


def test_page_is_written_whole(tmp_path: Path) -> None:
    save_page(simulated("hybrid"), tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    assert text == page_text(document_of(simulated("hybrid")))
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_error_for_another_suffix_names_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ss.PlanError, match=r"use a name in \.html or \.htm"):
        save_page(simulated("hybrid"), tmp_path / "step.txt")
