"""Pages: the numbers of ``docs/studies``, from the results: ``python -m bench.studies.pages``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.studies import breakdown, one_gpu, report, transfers
from bench.studies.study import STUDIES

DESCRIPTION = """\
Write the numbers of every study into its page, between two comments, from the JSON files that
"python -m bench.studies" wrote. What has no result yet says so. With --pictures the grids are drawn
anew too, from the first "superscaler simulate" of each page.
"""

BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"

WIDTH = 118
"""Of text; tables are as wide as they are."""

Result = dict[str, Any]
"""A JSON file of ``bench.studies``."""


def main(words: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.pages",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--docs", type=Path, default=Path("docs/studies"), help="folder of the pages")
    add("--results", type=Path, default=Path("bench/results"), help="folder of the JSON files")
    add("--images", type=Path, default=Path("docs/img"), help="folder of the grids")
    add("--pictures", action="store_true", help="draw the grids, too")
    args = parser.parse_args(words)
    for name, sections in PAGES.items():
        path = args.docs / f"{name}.md"
        texts = (text for section in sections for text in section(args.results, args.docs))
        numbers = "\n\n".join(texts)
        path.write_text(written(path.read_text(encoding="utf-8"), numbers), encoding="utf-8")
        print(path)
        if args.pictures and name in STUDIES:
            print(drawn(path, args.images))
    return 0


def written(page: str, numbers: str) -> str:
    """A page with other numbers.

    Raises:
        ValueError: it has not each of the two comments once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or page.count(BEGIN) + page.count(END) != 2:
        raise ValueError(f"a page needs one {BEGIN} and behind it one {END}.")
    return f"{before}{BEGIN}\n{numbers}\n{END}{after}"


# --- sections -----------------------------------------------------------------------------------

Section = Callable[[Path, Path], Iterator[str]]
"""From the folders of the results and of the pages to paragraphs."""


def _of(study: str, says: Callable[[Result], Iterator[str]], above: str = "") -> Section:
    """A section on one result: what it says, its picture, what is assumed, where it is from.

    Args:
        study: whose result.
        says: from it to paragraphs.
        above: study of the section before, whose assumptions need not be said again.
    """

    def section(results: Path, docs: Path) -> Iterator[str]:
        path = results / f"study_{study}.json"
        result = _read(path)
        if result is None:
            yield f"*Not computed yet: run `python -m bench.studies {study}`.*"
            return
        yield from says(result)
        picture = path.with_suffix(".png")
        if picture.exists():
            yield f"![{result['study']}]({_link(picture, docs)})"
        said = (_read(results / f"study_{above}.json") or {}).get("assumptions", ())
        new = [text for text in result["assumptions"] if text not in said]
        yield "Assumed, besides what is assumed above:" if above else "Assumed:"
        yield "\n".join(_filled(text, "- ") for text in new or ["nothing"])
        yield _filled(
            f"By `{result['command']}` on {result['date']}, commit {result['commit']}; all of it "
            f"is in [{path.name}]({_link(path, docs)})."
        )

    return section


def _overview(results: Path, docs: Path) -> Iterator[str]:
    """The largest speed-up of every study."""
    lines = [["study", "speed-up over the best baseline", "the paper"]]
    for name, study in STUDIES.items():
        result = _read(results / f"study_{name}.json")
        most = "not computed yet" if result is None else most_text(result)
        lines.append([f"[{study.title}]({name}.md)", most, f"up to {study.claim} x"])
    yield report.markdown(lines)


def _read(path: Path) -> Result | None:
    if not path.exists():
        return None
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    return found


def _link(path: Path, docs: Path) -> str:
    return Path(os.path.relpath(path.resolve(), docs.resolve())).as_posix()


def _filled(text: str, head: str = "") -> str:
    """As lines; what follows a list's dash is indented."""
    rest = " " * len(head)
    return fill(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# --- what is said of each -----------------------------------------------------------------------


def _speeds(result: Result) -> Iterator[str]:
    """Samples a second of all systems, beside the paper's claim; and their best ways."""
    rows, ours, claim = result["rows"], result["ours"], f"up to {result['claim']} x"
    names = " and ".join(f'"{name}"' for name in ours)
    yield _filled(
        "Samples a second by simulation, of the fastest way of every system that fits in memory; "
        f"the speed-up of the best of ours ({names}) over the best of the others, and the paper's:"
    )
    head, *lines = report.table_lines(rows, ours)
    yield report.markdown([[*head, "the paper"], *([*line, claim] for line in lines)])
    yield f"The largest speed-up is {most_text(result)}; the paper says {claim}."
    yield "The fastest ways:"
    yield report.markdown(report.ways_lines(rows))
    yield _filled(report.WAYS_LEGEND)


def most_text(result: Result) -> str:
    """The largest speed-up of a study."""
    found = [(report.speed_up(row, result["ours"]), row["gpus"]) for row in result["rows"]]
    ratio, gpus = max(((r, n) for r, n in found if r), default=(None, 0))
    return f"{ratio:.2f} x, on {gpus} GPUs" if ratio else "unknown: in no row both fit"


def _memory(result: Result) -> Iterator[str]:
    """GPT-3 on one GPU, by length."""
    rows = result["rows"]
    yield "### One GPU, by length of the sequence"
    yield "GiB of the GPU by tokens, whether it fits or not, and the longest sequence that fits:"
    yield report.markdown(one_gpu.memory_lines(rows))
    yield "\n".join(f"- {text}" for text in one_gpu.ratio_texts(rows))
    yield "Seconds of a step:"
    yield report.markdown(one_gpu.time_lines(rows))


def _breakdown(result: Result) -> Iterator[str]:
    """mBART's step in parts."""
    yield "### Where the time goes"
    yield "Seconds of a step, mean of the GPUs, of the best way of each plan:"
    yield report.markdown(breakdown.lines_of(result["rows"]))
    yield "\n".join(f"- {text}" for text in breakdown.ratios_text(result["rows"]).split("\n"))


def _transfers(result: Result) -> Iterator[str]:
    """RVD on and off."""
    yield "Times as long as by RVD that point-to-point takes, from one host of V100s to another:"
    yield report.markdown(transfers.case_lines(result["cases"]))
    yield f"So {transfers.worst_text(result['cases'])}."
    yield _filled(
        "The best way of every system in the studies: seconds of a step by RVD, and how many times "
        "as long it takes point-to-point inside stages, between them, and in both:"
    )
    yield report.markdown(transfers.study_lines(result["rows"]))


PAGES: dict[str, tuple[Section, ...]] = {
    "swin": (_of("swin", _speeds),),
    "gpt3": (_of("gpt3", _speeds), _of("memory", _memory, above="gpt3")),
    "mbart": (_of("mbart", _speeds), _of("breakdown", _breakdown, above="mbart")),
    "alphafold2": (_of("alphafold2", _speeds),),
    "README": (_overview, _of("transfers", _transfers)),
}
"""What is said in every page."""


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
