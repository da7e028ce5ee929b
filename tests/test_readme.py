"""Laws of the documents: their printouts are up to date, and tests and files they name exist.

``python -m tests.test_readme`` regenerates all printouts and pictures; review its diff.
"""

from __future__ import annotations

import codeop
import contextlib
import io
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm import cli
from rvdcomm.picture import svg
from superscaler_core import cli as superscaler_cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A fenced block: its language and its text. Blocks that need several processes are excerpts."""
ROUNDING = re.compile(r"(losses differ by at most|parameters by) \S+( \([\w.]+\)$)?", re.MULTILINE)
"""Figures of rounding errors, which differ between processors."""
NEEDS_PROCESSES = 'init_process_group("gloo")'
PROGRAMS = {"rvdcomm": cli.main, "superscaler": superscaler_cli.main}


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if f"({name})" not in index] == ["README.md"]


# --- printouts ----------------------------------------------------------------------------------


def rendered(text: str) -> str:
    """The document with every printout regenerated.

    A python block sees the names of the python blocks before it. The text block right below it is
    its printout. In a console block, lines that start with ``$`` are run.
    """
    names: dict[str, Any] = {"__name__": "document"}
    out: list[str] = []
    end = 0
    printed: str | None = None
    for block in BLOCK.finditer(text):
        between = text[end : block.start()]
        language, body = block.groups()
        if language == "text" and printed is not None and not between.strip():
            body, printed = printed, None
        elif printed:
            raise AssertionError(f"no text block shows what this prints: {printed!r}")
        elif language == "python" and NEEDS_PROCESSES not in body:
            printed = _printed(lambda body=body: exec(body, names))
        elif language == "console":
            body = _session(body)
        out += [between, f"```{language}\n{body}```"]
        end = block.end()
    return "".join(out) + text[end:]


def _printed(run: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        run()
    return stream.getvalue()


def _session(body: str) -> str:
    """A console session with the output of its commands regenerated."""
    out = []
    for line in (line for line in body.splitlines() if line.startswith("$ ")):
        program, *words = shlex.split(line[2:])
        assert program in PROGRAMS, f"{line}: only {', '.join(PROGRAMS)} are run in a console block"
        main = PROGRAMS[program]
        out.append(f"{line}\n{_printed(lambda main=main, words=words: main(words))}")
    return "".join(out)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_printouts_in_documents_are_up_to_date(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text(encoding="utf-8")
    shown, printed = (ROUNDING.sub(r"\1", each) for each in (text, rendered(text)))
    assert printed == shown, "python -m tests.test_readme writes all printouts anew"


def fault_at_prompt(body: str) -> str | None:
    """The error of the prompt of Python 3.11 or 3.12 for a pasted block; None if the block runs.

    The prompt reads line by line, and a blank line ends a compound statement.
    """
    compile_lines = codeop.CommandCompiler()
    lines: list[str] = []
    for line in body.split("\n"):
        lines.append(line)
        try:
            is_whole = compile_lines("\n".join(lines), symbol="single") is not None
        except SyntaxError as error:
            return f"{error.msg}: {line!r}"
        lines = [] if is_whole else lines
    return f"unfinished: {lines[0]!r}" if any(lines) else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_python_blocks_of_documents_can_be_pasted_into_a_prompt(document: Path) -> None:
    # Blank lines between methods would end a class, so blocks with classes are not checked.
    bodies = [body for body in blocks(ROOT / document, "python") if "\nclass " not in f"\n{body}"]
    assert [fault for body in bodies if (fault := fault_at_prompt(body))] == []


@pytest.mark.parametrize(
    "body, fault",
    [
        ("for i in x:\n    f(i)\ng()\n", "invalid syntax: 'g()'"),
        ("for i in x:\n    f(i)\n\ng()\n", None),
        ("class C:\n    a = 1\n\n    b = 2\n", "unexpected indent: '    b = 2'"),
        ("f(\n    1,\n\n    2,\n)\n", None),
        ("f(\n    1,\n", "unfinished: 'f('"),
    ],
)
def test_a_prompt_ends_blocks_at_blank_lines(body: str, fault: str | None) -> None:
    assert fault_at_prompt(body) == fault


def blocks(document: Path, language: str) -> list[str]:
    """Texts of a document's blocks in one language."""
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    return [body for name, body in found if name == language]


def test_readme_code_equals_the_first_look_example() -> None:
    shown = "\n".join(body for body in blocks(README, "python") if NEEDS_PROCESSES not in body)
    assert (ROOT / "examples/first_look.py").read_text().endswith('"""\n\n' + shown)


def test_readme_shows_the_output_of_the_first_look_example() -> None:
    code = (ROOT / "examples/first_look.py").read_text()
    printed = _printed(lambda: exec(code, {"__name__": "__main__"}))
    assert printed == "".join(blocks(README, "text")[:2])


def test_readme_block_with_processes_is_an_excerpt_of_its_example() -> None:
    (shown,) = (body for body in blocks(README, "python") if NEEDS_PROCESSES in body)
    assert shown in (ROOT / "examples/redistribute_gloo.py").read_text()


def test_readme_training_lines_are_on_the_training_page() -> None:
    (shown,) = blocks(README, "py")
    (page,) = blocks(ROOT / "docs/training.md", "python")
    assert {line.strip() for line in shown.splitlines()} <= {x.strip() for x in page.splitlines()}


def test_readme_has_code_by_line_10_and_a_plan_by_line_30() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert "```python" in lines[:10]
    assert any(line.startswith("cost  ") for line in lines[:30])


def test_readme_has_at_most_130_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


# --- pictures -----------------------------------------------------------------------------------


def pictures() -> dict[str, rv.Plan]:
    """The plan of every picture in ``docs/img``."""
    hosts = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(5e-6, 100e9), rv.Link(20e-6, 10e9))

    def planned(shape: tuple[int, ...], src: str, dst: str) -> rv.Plan:
        return rv.plan(rv.Layout(shape, src), rv.Layout(shape, dst), "float32", hosts)

    return {
        "first_look.svg": planned((1024, 1024), "R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)"),
        "hosts_first.svg": planned((2048, 2048), "R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)"),
    }


@pytest.mark.parametrize("name", pictures())
def test_pictures_are_up_to_date_with_their_plans(name: str) -> None:
    drawn = (ROOT / "docs/img" / name).read_text(encoding="utf-8")
    assert drawn == svg(pictures()[name]), "python -m tests.test_readme draws all pictures anew"


# --- names --------------------------------------------------------------------------------------


@cache
def names_of_tests() -> frozenset[str]:
    """Names of test files, and of all functions in them."""
    known = set()
    for path in ROOT.glob("tests/**/test_*.py"):
        known |= {path.stem, *re.findall(r"^def (\w+)", path.read_text("utf-8"), re.MULTILINE)}
    return frozenset(known)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_tests_that_documents_name_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert set(re.findall(r"\btest_\w+", text)) - names_of_tests() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_documents_name_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:rvdcomm|bench|tests|examples|docs|tools)/[\w./]*\w\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def main() -> None:
    """Regenerate every printout and every picture."""
    for document in DOCUMENTS:
        path = ROOT / document
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            text = rendered(path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
    for name, plan in pictures().items():
        (ROOT / "docs/img" / name).write_text(svg(plan), encoding="utf-8")


if __name__ == "__main__":
    main()
