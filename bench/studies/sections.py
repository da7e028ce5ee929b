"""Sections: what parts of the pages say of a result, as paragraphs of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.cells.searches import over
from bench.hidup import command as hidup
from bench.hidup.models import CLUSTERS, SYSTEMS
from bench.studies import one_gpu, report, sensitivity, strong_scaling, transfers
from bench.studies.study import COLUMNS, TODAY
from bench.tables import markdown

WIDTH = 118
"""Of text; tables are as wide as they are."""

Result = Mapping[str, Any]
"""What a command wrote."""


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
        return f"![{title}]({link(path, self.docs)})"


Section = Callable[[Result, Pictures], Iterator[str]]
"""From the result to paragraphs."""


# --- the four studies ---------------------------------------------------------------------------


def first_screen(name: str) -> Section:
    """The picture of a study, and its largest and least factor in either column."""

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        study = result["studies"][name]
        cells = report.compared(study)
        said = [f"**{_factors(cells, column)}** with {text}" for column, text in COLUMNS.items()]
        yield filled(
            f"Factors over the best baseline, simulated: {'; '.join(said)}. The paper says up to "
            f"{study['claim']} x."
        )
        title = study["title"]
        yield pictures.add(
            name, title, lambda path: report.plot(cells, study["claim"], title, path)
        )
        yield filled(
            "A factor is our speed over that of the best baseline. The ceiling is 1 / the share of "
            "computing in the best baseline's step: no plan that computes as much gains more."
        )

    return section


def tables(name: str) -> Section:
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
            yield markdown(report.speed_lines(mine))
            yield "Plans, and where their time goes:"
            yield markdown(report.plan_lines(mine))
            yield filled(report.PLANS_LEGEND)
            problems = report.problem_texts(mine)
            if problems:
                yield "No plan, and why:"
                yield _list(problems)

    return section


def tables_and_memory(result: Result, pictures: Pictures) -> Iterator[str]:
    """The tables of GPT-3, and memory on one GPU by length."""
    yield from tables("gpt3")(result, pictures)
    rows = result["memory"]["rows"]
    yield "### One GPU, by length of the sequence"
    yield "GiB of the GPU by tokens, whether it fits or not, and the longest sequence that fits:"
    yield markdown(one_gpu.memory_lines(rows))
    yield _list(one_gpu.ratio_texts(rows))
    yield "Seconds of a step:"
    yield markdown(one_gpu.time_lines(rows))
    yield pictures.add("memory", "Memory on one GPU", lambda path: one_gpu.draw(rows, path))
    yield _list(result["memory"]["notes"])


def overview(result: Result, pictures: Pictures) -> Iterator[str]:
    """The largest and the least factor of every study in either column."""
    lines = [["study", *COLUMNS, "the paper"]]
    for name, study in result["studies"].items():
        cells = report.compared(study)
        texts = [_factors(cells, column) for column in COLUMNS]
        lines.append([f"[{study['title']}]({name}.md)", *texts, f"up to {study['claim']} x"])
    yield markdown(lines)
    yield _list([f"{column}: {text}" for column, text in COLUMNS.items()])


def moves(result: Result, pictures: Pictures) -> Iterator[str]:
    """RVD on and off."""
    yield "Times as long as by RVD that point-to-point takes, from one host of V100s to another:"
    yield markdown(transfers.case_lines(result["transfers"]))
    yield f"So {transfers.worst_text(result['transfers'])}."
    yield filled(
        "The plans of today: seconds of a step by RVD, and how many times as long it takes "
        "point-to-point inside stages, between them, and in both. Plans whose step nowhere differs "
        "by 1 % are left out."
    )
    rows = [
        row
        for study in result["studies"].values()
        for cell in report.compared(study)
        if cell.column == TODAY
        for row in cell.rows.values()
    ]
    yield markdown(transfers.pulled_lines(rows))


def _factors(cells: list[report.Compared], column: str) -> str:
    return report.factors_text([cell for cell in cells if cell.column == column])


# --- what surrounds them ------------------------------------------------------------------------


def scaling(result: Result, pictures: Pictures) -> Iterator[str]:
    """One GPT-3 on more and more GPUs."""
    rows = result["rows"]
    title = "GPT-3 on 4 to 256 GPUs"
    yield pictures.add("scaling", title, lambda path: strong_scaling.draw(rows, path))
    yield "Samples a second, and the speed-up over the fewest GPUs with RVD:"
    yield markdown(strong_scaling.lines(rows))


def assumptions(result: Result, pictures: Pictures) -> Iterator[str]:
    """The factors of 16 GPUs, with other values of what is least certain."""
    found = sensitivity.compared(result["rows"])
    title = "Factors with other assumptions"
    yield pictures.add("sensitivity", title, lambda path: sensitivity.draw(found, path))
    yield markdown(sensitivity.lines(found))


# --- HiDup's evaluation -------------------------------------------------------------------------


def hidup_first(result: Result, pictures: Pictures) -> Iterator[str]:
    """By cell, how many times as long the best system takes as HiDup's strategy."""
    rows = result["rows"]
    factors = {
        tuple(cell.split()): min(others[name] for name in SYSTEMS if name in others)
        for cell, others in over(rows, hidup.HIDUP).items()
    }
    models = list(dict.fromkeys(model for _, model in factors))
    lines = [["cluster", *models]]
    for cluster in dict.fromkeys(cluster for cluster, _ in factors):
        given = (factors.get((cluster, model)) for model in models)
        lines.append([cluster, *(f"{x:.2f} x" if x else "-" for x in given)])
    yield "Step of the best other system over that of the strategy that HiDup's planner finds:"
    yield markdown(lines)
    title = "Steps over that of HiDup's strategy"
    yield pictures.add("hidup", title, lambda path: hidup.draw(rows, path))


def hidup_tables(result: Result, pictures: Pictures) -> Iterator[str]:
    """The break-down of every cluster, and the strategies that were found."""
    for cluster in CLUSTERS:
        mine = [row for row in result["rows"] if row["cell"].split()[0] == cluster]
        if not mine:
            continue
        yield f"### {cluster}"
        yield markdown(hidup.lines(cluster, mine))
        yield _list(
            f"{row['cell'].split()[1]}, {row['planner']}: {row['plan']}; predicted at most "
            f"{row['over_bound']:.1%} above the best strategy"
            for row in mine
            if "plan" in row
        )


# --- text ---------------------------------------------------------------------------------------


def _list(texts: Iterable[str]) -> str:
    return "\n".join(filled(text, "- ") for text in texts)


def link(path: Path, docs: Path) -> str:
    """A file as a page names it."""
    return Path(relpath(path.resolve(), docs.resolve())).as_posix()


def filled(text: str, head: str = "") -> str:
    """As lines; what follows a list's dash is indented."""
    rest = " " * len(head)
    return fill(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
