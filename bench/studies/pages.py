"""Pages: results in ``docs/studies``, from one run: ``python -m bench.studies.pages``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.studies import one_gpu, report, transfers
from bench.studies.study import COLUMNS, STUDIES, TODAY

DESCRIPTION = """\
Write what "python -m bench.studies all" found into every page, between two comments: the result
with its picture at the top (result), assumptions and tables at the end (numbers). With --grids the
grids of plans are drawn anew too, from the first "superscaler simulate" of each page.
"""

WIDTH = 118
"""Of text; tables are as wide as they are."""

Result = Mapping[str, Any]
"""What ``bench.studies`` wrote."""


def main(words: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.pages",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--docs", type=Path, default=Path("docs/studies"), help="folder of the pages")
    add("--result", type=Path, default=Path("bench/results/studies.json"), help="the JSON file")
    add("--images", type=Path, default=Path("docs/img"), help="folder of pictures")
    add("--grids", action="store_true", help="draw the grids, too")
    args = parser.parse_args(words)
    if not args.result.exists():
        parser.error(f"{args.result} is missing: run `python -m bench.studies all` first.")
    result = json.loads(args.result.read_text(encoding="utf-8"))
    for name, sections in PAGES.items():
        path = args.docs / f"{name}.md"
        page = path.read_text(encoding="utf-8")
        pictures = Pictures(args.images, args.docs)
        source = _filled(
            f"By `{result['command']}` on {result['date']}, {result['commits']}; all of it is in "
            f"[{args.result.name}]({_link(args.result, args.docs)})."
        )
        for part, section in sections.items():
            page = written(page, part, "\n\n".join([*section(result, pictures), source]))
        path.write_text(page, encoding="utf-8")
        print(path)
        if args.grids and name in STUDIES:
            print(drawn(path, args.images))
    return 0


def written(page: str, part: str, text: str) -> str:
    """A page with another text in one of its parts.

    Raises:
        ValueError: it has not each of the part's two comments once, in order.
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last or page.count(begin) + page.count(end) != 2:
        raise ValueError(f"a page needs one {begin} and behind it one {end}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


@dataclass(frozen=True)
class Pictures:
    """Draws pictures for pages.

    Attributes:
        images: folder of the pictures.
        docs: folder of the pages.
    """

    images: Path
    docs: Path

    def add(self, name: str, title: str, draw: Callable[[Path], None]) -> str:
        """Draw a picture; returns the text that shows it."""
        path = self.images / f"study_{name}.png"
        draw(path)
        return f"![{title}]({_link(path, self.docs)})"


# --- sections -----------------------------------------------------------------------------------

Section = Callable[[Result, Pictures], Iterator[str]]
"""From the result to paragraphs."""


def _first_screen(name: str) -> Section:
    """The picture of a study, and samples a second of all systems in either column."""

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        study = result["studies"][name]
        cells = report.compared(study)
        said = [f"**{_most(cells, column)}** with {text}" for column, text in COLUMNS.items()]
        yield _filled(
            f"Largest factor over the best baseline, simulated: {'; '.join(said)}. The paper says "
            f"up to {study['claim']} x."
        )
        title = study["title"]
        yield pictures.add(
            name, title, lambda path: report.plot(cells, study["claim"], title, path)
        )
        yield _filled(
            "A factor is our speed over that of the best baseline. The ceiling is 1 / the share of "
            "computing in the best baseline's step: no plan that computes as much gains more."
        )

    return section


def _tables(name: str) -> Section:
    """What a study assumes, and its tables."""

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        study = result["studies"][name]
        cells = report.compared(study)
        yield "### What is assumed"
        yield _list([*result["assumptions"], *study["differences"]])
        for column, text in COLUMNS.items():
            mine = [cell for cell in cells if cell.column == column]
            yield f"### Column {column}: {text}"
            yield "Samples a second:"
            yield report.markdown(report.speed_lines(mine))
            yield "Plans, and where their time goes:"
            yield report.markdown(report.plan_lines(mine))
            yield _filled(report.PLANS_LEGEND)

    return section


def _and_memory(result: Result, pictures: Pictures) -> Iterator[str]:
    """The tables of GPT-3, and memory on one GPU by length."""
    yield from _tables("gpt3")(result, pictures)
    rows = result["memory"]["rows"]
    yield "### One GPU, by length of the sequence"
    yield "GiB of the GPU by tokens, whether it fits or not, and the longest sequence that fits:"
    yield report.markdown(one_gpu.memory_lines(rows))
    yield _list(one_gpu.ratio_texts(rows))
    yield "Seconds of a step:"
    yield report.markdown(one_gpu.time_lines(rows))
    yield pictures.add("memory", "Memory on one GPU", lambda path: one_gpu.draw(rows, path))
    yield _list(result["memory"]["notes"])


def _overview(result: Result, pictures: Pictures) -> Iterator[str]:
    """The largest factor of every study in either column."""
    lines = [["study", *COLUMNS, "the paper"]]
    for name, study in result["studies"].items():
        cells = report.compared(study)
        texts = [_most(cells, column) for column in COLUMNS]
        lines.append([f"[{study['title']}]({name}.md)", *texts, f"up to {study['claim']} x"])
    yield report.markdown(lines)
    yield _list([f"{column}: {text}" for column, text in COLUMNS.items()])


def _transfers(result: Result, pictures: Pictures) -> Iterator[str]:
    """RVD on and off."""
    yield "Times as long as by RVD that point-to-point takes, from one host of V100s to another:"
    yield report.markdown(transfers.case_lines(result["transfers"]))
    yield f"So {transfers.worst_text(result['transfers'])}."
    yield _filled(
        "The plans of today: seconds of a step by RVD, and how many times as long it takes "
        "point-to-point inside stages, between them, and in both:"
    )
    rows = [
        row
        for study in result["studies"].values()
        for cell in report.compared(study)
        if cell.column == TODAY
        for row in cell.rows.values()
    ]
    yield report.markdown(transfers.pulled_lines(rows))


PAGES: Mapping[str, Mapping[str, Section]] = {
    **{name: {"result": _first_screen(name), "numbers": _tables(name)} for name in STUDIES},
    "gpt3": {"result": _first_screen("gpt3"), "numbers": _and_memory},
    "README": {"result": _overview, "numbers": _transfers},
}
"""What is said in the parts of every page."""


def _most(cells: list[report.Compared], column: str) -> str:
    """The largest factor of a column."""
    best = report.largest([cell for cell in cells if cell.column == column])
    return f"{best.factor:.2f} x on {best.gpus} GPUs" if best else "unknown: nowhere do both fit"


def _list(texts: Iterable[str]) -> str:
    return "\n".join(_filled(text, "- ") for text in texts)


def _link(path: Path, docs: Path) -> str:
    return Path(os.path.relpath(path.resolve(), docs.resolve())).as_posix()


def _filled(text: str, head: str = "") -> str:
    """As lines; what follows a list's dash is indented."""
    rest = " " * len(head)
    return fill(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# --- pictures -----------------------------------------------------------------------------------

SIMULATED = re.compile(r"^\$ superscaler (simulate .*?)(?: --summary)?$", re.MULTILINE)


def drawn(page: Path, images: Path) -> Path:
    """Draw the grid of a page's first ``superscaler simulate``.

    Raises:
        ValueError: the page has no such command.
    """
    from superscaler_core import cli

    found = SIMULATED.search(page.read_text(encoding="utf-8"))
    if not found:
        raise ValueError(f"{page} has no line '$ superscaler simulate ...' to draw.")
    path = images / f"{page.stem}.png"
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main([*shlex.split(found[1]), "--picture", str(path)])
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
