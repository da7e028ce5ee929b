"""``python -m bench.pages``: write results into documents."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.command_line import parser_for
from bench.pages import hidup, measured, search, stages, studies, synthesis, truth
from bench.pages.text import Pictures, Result, Section, filled, link, written
from bench.studies.study import STUDIES

DESCRIPTION = """\
Write results into pages of docs, each into its part between two comments. A part whose result file
is not there stays as it is. With --grids the grids of plans are drawn anew too, from the first
"superscaler simulate" of each study's page.
"""

COMMANDS: Mapping[str, str] = {
    "studies": "python -m bench.studies all",
    "hidup": "python -m bench.hidup",
    "strong_scaling": "python -m bench.studies.strong_scaling",
    "sensitivity": "python -m bench.studies.sensitivity",
    "search": "python -m bench.search",
    "search-large": "python -m bench.search --budget 40 "
    "--cells gpt-15b,gpt-39b,moe-27b,moe-70b,wresnet-6.8b,wresnet-13b,bert,vit "
    "--planners auto,Megatron,ZeRO-3,FSDP+TP+PP,DDP,Horovod,FastMoE,DeepSpeed-MoE,"
    "alpa_hierarchical,by_hand,tofu,galvatron,hidup,unity,flexflow "
    "--out bench/results/search-large.json",
    "alpa_plans": "python -m bench.alpa_plans",
    "stage_planners": "python -m bench.stage_planners --out bench/results/stage_planners.json",
    "truth": "python -m bench.truth --published --out bench/results/truth.json",
    "truth-scaling": "python -m bench.truth --scaling --out bench/results/truth-scaling.json",
    "truth-readings": "python -m bench.truth --readings --every 12 "
    "--out bench/results/truth-readings.json",
    "synthesis": "python -m bench.synthesis",
    "networks": "python -m bench.networks",
    "local-4": "python -m bench.run --only in-group --secs 2 --out bench/results/local-4.json",
    **{
        name: f"python -m bench.{words} --out bench/results/{name}.json"
        for name, (words, _) in measured.SECTIONS.items()
    },
}
"""The commands that write the results, by the names of the result files."""

PAGES: Mapping[str, Mapping[str, tuple[str, Section]]] = {
    **{
        f"studies/{name}": {
            "result": ("studies", studies.first_screen(name)),
            "numbers": ("studies", studies.tables(name)),
        }
        for name in STUDIES
    },
    "studies/gpt3": {
        "result": ("studies", studies.first_screen("gpt3")),
        "numbers": ("studies", studies.tables_and_memory),
    },
    "studies/hidup": {
        "result": ("hidup", hidup.first_screen),
        "numbers": ("hidup", hidup.tables),
    },
    "studies/README": {
        "result": ("studies", studies.overview),
        "assumed": ("studies", studies.assumed),
        "scaling": ("strong_scaling", studies.scaling),
        "sensitivity": ("sensitivity", studies.assumptions),
        "numbers": ("studies", studies.moves),
    },
    "../README": {"measured": ("local-4", measured.one_host)},
    "measured": {
        **{name: (name, section) for name, (_, section) in measured.SECTIONS.items()},
        "reached": ("search", search.reached),
        "reached-large": ("search-large", search.reached),
        "published": ("alpa_plans", search.beside_published),
    },
    "stages": {"numbers": ("stage_planners", stages.cuts)},
    "truth": truth.SECTIONS,
    "synthesis": synthesis.SECTIONS,
}
"""The parts of every page, each with the name of its result and the section that describes it."""


def main(words: list[str]) -> int:
    """Run the command."""
    parser = parser_for("pages", DESCRIPTION)
    add = parser.add_argument
    add("--docs", type=Path, default=Path("docs"), help="folder of the pages")
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
                said = paragraphs(section, there[result], Pictures(args.images, path.parent))
                page = written(page, part, "\n\n".join(said))
        path.write_text(page, encoding="utf-8")
        print(path)
        if args.grids and path.stem in STUDIES:
            print(drawn(path, args.images))
    return 0


def paragraphs(section: Section, path: Path, pictures: Pictures) -> Iterator[str]:
    """The paragraphs of a section about the result in a file, and a last one with the source."""
    result = json.loads(path.read_text(encoding="utf-8"))
    yield from section(result, pictures)
    yield filled(
        f"By `{result['command']}` on {result['date']}, {_commits(result)}; all of it is in "
        f"[{path.name}]({link(path, pictures.folder)})."
    )


def _commits(result: Result) -> str:
    """The commits of the rows, if the command stores rows; otherwise that of the whole result."""
    return result.get("commits") or f"commit {result['commit']}"


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
