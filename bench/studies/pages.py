"""Pages: results in ``docs/studies``: ``python -m bench.studies.pages``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.studies import sections
from bench.studies.sections import Pictures, Section, filled, link
from bench.studies.study import STUDIES

DESCRIPTION = """\
Write results into the pages of docs/studies, each into its part between two comments: the result
with its picture at the top (result), tables at the end (numbers). A part whose result file is not
there stays as it is. With --grids the grids of plans are drawn anew too, from the first
"superscaler simulate" of each page.
"""

COMMANDS: Mapping[str, str] = {
    "studies": "python -m bench.studies all",
    "hidup": "python -m bench.hidup",
    "strong_scaling": "python -m bench.studies.strong_scaling",
    "sensitivity": "python -m bench.studies.sensitivity",
}
"""What writes the results, by the names of their files."""

PAGES: Mapping[str, Mapping[str, tuple[str, Section]]] = {
    **{
        name: {
            "result": ("studies", sections.first_screen(name)),
            "numbers": ("studies", sections.tables(name)),
        }
        for name in STUDIES
    },
    "gpt3": {
        "result": ("studies", sections.first_screen("gpt3")),
        "numbers": ("studies", sections.tables_and_memory),
    },
    "hidup": {
        "result": ("hidup", sections.hidup_first),
        "numbers": ("hidup", sections.hidup_tables),
    },
    "README": {
        "result": ("studies", sections.overview),
        "scaling": ("strong_scaling", sections.scaling),
        "sensitivity": ("sensitivity", sections.assumptions),
        "numbers": ("studies", sections.moves),
    },
}
"""The parts of every page: of which result, and what is said of it."""


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
    add("--images", type=Path, default=Path("docs/img"), help="folder of pictures")
    add("--grids", action="store_true", help="draw the grids, too")
    args = parser.parse_args(words)
    paths = {name: args.results / f"{name}.json" for name in COMMANDS}
    there = {name: path for name, path in paths.items() if path.exists()}
    if not there:
        parser.error(f"{args.results} has no result: run `{COMMANDS['studies']}` first.")
    for name in paths.keys() - there.keys():
        print(f"no {paths[name]}: its parts stay; `{COMMANDS[name]}` makes it")
    for name, parts in PAGES.items():
        path = args.docs / f"{name}.md"
        page = path.read_text(encoding="utf-8")
        for part, (result, section) in parts.items():
            if result in there:
                said = paragraphs(section, there[result], Pictures(args.images, args.docs))
                page = written(page, part, "\n\n".join(said))
        path.write_text(page, encoding="utf-8")
        print(path)
        if args.grids and name in STUDIES:
            print(drawn(path, args.images))
    return 0


def paragraphs(section: Section, path: Path, pictures: Pictures) -> Iterator[str]:
    """What a section says of the result in a file, and where that is from."""
    result = json.loads(path.read_text(encoding="utf-8"))
    yield from section(result, pictures)
    yield filled(
        f"By `{result['command']}` on {result['date']}, {result['commits']}; all of it is in "
        f"[{path.name}]({link(path, pictures.docs)})."
    )


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
