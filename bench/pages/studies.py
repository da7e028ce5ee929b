"""Sections of pages about the four studies, their assumptions, and scaling with GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from bench.pages.text import Pictures, Result, Section, filled, listed
from bench.studies import one_gpu, report, sensitivity, strong_scaling, transfers
from bench.studies.study import TODAY
from bench.tables import markdown

SHARED = "README.md#what-all-studies-assume"
"""The section that has what the pages of the studies share."""

# --- the four studies ---------------------------------------------------------------------------


def first_screen(name: str) -> Section:
    """A section with the picture of a study, and its largest and least factor in each column."""

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        study = result["studies"][name]
        cells = report.compared(study)
        columns = result["columns"]
        said = [f"**{_factors(cells, column)}** with {text}" for column, text in columns.items()]
        yield filled(
            "Factors over the best baseline, simulated ([definitions](README.md)): "
            f"{'; '.join(said)}. The paper says up to {study['claim']} x."
        )
        title = study["title"]
        yield pictures.add(
            name, title, lambda path: report.plot(cells, study["claim"], title, path)
        )

    return section


def tables(name: str) -> Section:
    """A section with the assumptions of a study, and its tables."""

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        study = result["studies"][name]
        cells = report.compared(study)
        yield "### What is assumed"
        yield f"[What all studies assume]({SHARED}), and:"
        yield listed(study["differences"])
        for column in result["columns"]:
            mine = [cell for cell in cells if cell.column == column]
            yield f"### Column {column}"
            yield "Samples a second:"
            yield markdown(report.speed_lines(mine))
            yield "Plans, and where their time goes:"
            yield markdown(report.plan_lines(mine))
            problems = report.problem_texts(mine)
            if problems:
                yield "No plan, and why:"
                yield listed(problems)

    return section


def tables_and_memory(result: Result, pictures: Pictures) -> Iterator[str]:
    """The tables of GPT-3, and the memory on one GPU by sequence length."""
    yield from tables("gpt3")(result, pictures)
    rows = result["memory"]["rows"]
    yield "### One GPU, by length of the sequence"
    yield "GiB of the GPU by tokens, whether it fits or not, and the longest sequence that fits:"
    yield markdown(one_gpu.memory_lines(rows))
    yield listed(one_gpu.ratio_texts(rows))
    yield "Seconds of a step:"
    yield markdown(one_gpu.time_lines(rows))
    yield pictures.add("memory", "Memory on one GPU", lambda path: one_gpu.draw(rows, path))
    yield listed(result["memory"]["notes"])


def overview(result: Result, pictures: Pictures) -> Iterator[str]:
    """The largest and the least factor of every study in each column."""
    columns = result["columns"]
    lines = [["study", *columns, "the paper"]]
    for name, study in result["studies"].items():
        cells = report.compared(study)
        texts = [_factors(cells, column) for column in columns]
        lines.append([f"[{study['title']}]({name}.md)", *texts, f"up to {study['claim']} x"])
    yield markdown(lines)
    yield listed([f"{column}: {text}" for column, text in columns.items()])


def assumed(result: Result, pictures: Pictures) -> Iterator[str]:
    """What all studies assume, and the words of their tables."""
    yield listed(result["assumptions"])
    yield filled(
        "A *factor* is our speed over that of the best baseline. The *ceiling* is 1 / the share "
        "of computing in the best baseline's step: no plan that computes as much gains more. In "
        f"tables of plans, {report.PLANS_LEGEND}"
    )


def moves(result: Result, pictures: Pictures) -> Iterator[str]:
    """Step times with RVD plans and with point-to-point communication."""
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


# --- scaling and assumptions --------------------------------------------------------------------


def scaling(result: Result, pictures: Pictures) -> Iterator[str]:
    """Strong scaling of one GPT-3."""
    rows = result["rows"]
    title = "GPT-3 on 4 to 256 GPUs"
    yield pictures.add("scaling", title, lambda path: strong_scaling.draw(rows, path))
    yield "Samples a second, and the speed-up over the fewest GPUs with RVD:"
    yield markdown(strong_scaling.lines(rows))


def assumptions(result: Result, pictures: Pictures) -> Iterator[str]:
    """The factors on 16 GPUs, with other values of the least certain assumptions."""
    found = sensitivity.compared(result["rows"])
    title = "Factors with other assumptions"
    yield pictures.add("sensitivity", title, lambda path: sensitivity.draw(found, path))
    yield markdown(sensitivity.lines(found))
