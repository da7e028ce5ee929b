"""In a browser: the page shows a row per device, zooms, says what runs, and raises no error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from superscaler_core.page import CandidateRow, document_of
from superscaler_core.page.write import page_text
from tests.superscaler_core.page.pages import HOSTILE, hostile, simulated

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

# What a reader does, and what the page then shows.
ACTIONS = """
<script>
const said = {};
const text = (id) => document.getElementById(id).textContent;
const bar = document.querySelector("#rows canvas");
const box = bar.getBoundingClientRect();
const at = (share, y) => (
  { bubbles: true, cancelable: true, clientX: box.left + share * box.width, clientY: box.top + y });
bar.dispatchEvent(new MouseEvent("mousemove", at(0.02, 10)));
said.tip = text("tip");
said.whole = text("range");
bar.dispatchEvent(new WheelEvent("wheel", { ...at(0.02, 10), deltaY: -600 }));
said.zoomed = text("range");
bar.dispatchEvent(new MouseEvent("mousedown", at(0.5, 10)));
window.dispatchEvent(new MouseEvent("mousemove", at(0.2, 10)));
window.dispatchEvent(new MouseEvent("mouseup", at(0.2, 10)));
said.panned = text("range");
window.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
said.reset = text("range");
const column = (i) => [...document.querySelectorAll("#edges tbody tr")].map(
  (row) => row.cells[i].textContent);
const heads = [...document.querySelectorAll("#edges th")];
const names = heads.map((head) => head.textContent);
said.byBytes = column(names.indexOf("bytes a step"));
heads[names.indexOf("time a step")].click();
said.byTime = column(names.indexOf("time a step"));
document.querySelector("#edges tbody tr").click();
said.words = document.querySelector("#edges td.detail").textContent;
said.layers = [...document.querySelectorAll("#layers tbody tr")].map(
  (row) => row.cells[0].textContent);
said.chosen = [...document.querySelectorAll("#candidates tr.chosen")].map(
  (row) => row.textContent);
const made = document.createElement("pre");
made.id = "said";
made.textContent = JSON.stringify(said);
document.body.append(made);
</script>
</body>
"""


def opened(text: str, folder: Path) -> tuple[str, list[str]]:
    """The page's elements after its scripts, and what the console said."""
    assert BROWSER is not None
    (folder / "page.html").write_text(text)
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--window-size=1400,1000", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=2000", "--dump-dom", (folder / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], dict[str, Any]]:
    candidates = [CandidateRow("tp=2 pp=2", 0.01, 1, is_chosen=True), CandidateRow(HOSTILE, 1.0, 1)]
    text = page_text(document_of(simulated("hybrid"), candidates))
    head, _, _ = text.rpartition("</body>")
    elements, console = opened(head + ACTIONS, tmp_path_factory.mktemp("page"))
    found = re.search(r'<pre id="said">(.*?)</pre>', elements, re.DOTALL)
    assert found is not None, console
    return elements, console, json.loads(unescape(found[1]))


def test_page_has_a_row_per_device_and_the_console_is_silent(
    page: tuple[str, list[str], dict[str, Any]],
) -> None:
    elements, console, _ = page
    assert console == []
    assert re.findall(r'class="row" data-device="(\d+)"', elements) == ["0", "1", "2", "3"]


def test_wheel_zooms_dragging_pans_and_a_key_shows_the_whole_step(
    page: tuple[str, list[str], dict[str, Any]],
) -> None:
    said = page[2]
    assert said["whole"].startswith("0 s to ")
    assert len({said["whole"], said["zoomed"], said["panned"]}) == 3
    assert said["reset"] == said["whole"]


def test_hovering_over_a_bar_says_what_runs_and_how_it_is_split(
    page: tuple[str, list[str], dict[str, Any]],
) -> None:
    tip = page[2]["tip"]
    assert "forward of stage 0, microbatch 0 on device 0" in tip
    assert re.search(r"layers\.0|embed", tip)
    assert "devices 0,1, stage 0" in tip


def test_edges_sort_by_bytes_and_by_time_and_say_their_plan(
    page: tuple[str, list[str], dict[str, Any]],
) -> None:
    said = page[2]
    rows = document_of(simulated("hybrid"))["edges"]
    assert len(said["byBytes"]) == len(said["byTime"]) == len(rows)
    assert said["byBytes"] != said["byTime"]
    assert any(said["words"].startswith("".join(row["words"])) for row in rows)


def test_layers_and_the_chosen_candidate_are_listed(
    page: tuple[str, list[str], dict[str, Any]],
) -> None:
    said = page[2]
    assert [name for name in said["layers"] if name.startswith("layers.")] == [
        f"layers.{i}" for i in range(4)
    ]
    assert len(said["chosen"]) == 1
    assert said["chosen"][0].startswith("tp=2 pp=2")


def test_page_of_a_hostile_model_opens_without_an_error(tmp_path: Path) -> None:
    elements, console = opened(page_text(document_of(hostile())), tmp_path)
    assert console == []
    assert elements.count("data-device") == 1
    assert "&lt;/script&gt;" in elements
